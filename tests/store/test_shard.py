"""One shard's bytes: what goes in comes out, raw copies nothing, no flipped bit passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from store.checksum import crc32c
from store.codec import DTYPES, Codec, compress, decompress
from store.errors import DamagedObject, FormatError
from store.geometry import ArrayGeometry
from store.shard import decode_chunk, encode_chunks, encode_shard
from store.shard_index import (
    chunk_offsets,
    pack_chunk_sizes,
    raw_chunk_sizes,
    unpack_chunk_sizes,
)

KEY = "data/00000007/a0/z/c/3/0/0/0"
SHAPES = [(4, 700, 16), (1, 1, 8), (3, 256, 64), (8, 257, 128), (9, 512, 64), (2, 40, 2048)]


def _case(heads: int, tokens: int, size: int, dtype: str, seed: int = 0):
    element = DTYPES[dtype]
    geometry = ArrayGeometry.plan(
        num_layers=1,
        num_tokens=tokens,
        num_heads=heads,
        shard_heads=heads,
        head_size=size,
        item_bytes=element.itemsize,
    )
    values = np.random.default_rng(seed).standard_normal((heads, tokens, size)) * 50
    return geometry, values.astype(element)


def _decode(geometry, encoded, codec, dtype):
    data = b"".join(bytes(part) for part in encoded)
    assert len(data) == encoded.num_bytes
    chunks = geometry.token_chunks_in_shard(0)
    out = np.zeros(
        (geometry.shard_heads, chunks * geometry.chunk_tokens, geometry.head_size), dtype
    )
    offsets = chunk_offsets(geometry, encoded.chunk_sizes).tolist()
    for number, (start, end) in enumerate(pairwise(offsets)):
        group, chunk = divmod(number, chunks)
        values = decode_chunk(geometry, data[start:end], codec, dtype, KEY, number)
        heads = slice(group * geometry.group_heads, (group + 1) * geometry.group_heads)
        out[heads, chunk * geometry.chunk_tokens : (chunk + 1) * geometry.chunk_tokens] = values
    return out


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip_is_bit_exact_and_the_tail_is_zero(shape, dtype, codec):
    geometry, data_HTD = _case(*shape, dtype)
    out = _decode(geometry, encode_shard(geometry, 0, data_HTD, codec, KEY), codec, DTYPES[dtype])
    tokens = data_HTD.shape[1]
    assert out[:, :tokens].tobytes() == data_HTD.tobytes()
    assert not out[:, tokens:].view(np.uint8).any()


def test_raw_parts_are_views_of_a_strided_array():
    geometry, _ = _case(4, 512, 16, "float32")
    backing = np.random.default_rng(1).standard_normal((4, 600, 16)).astype(np.float32)
    data_HTD = backing[:, 50:562]
    encoded = encode_shard(geometry, 0, data_HTD, Codec.RAW, KEY)
    viewed = sum(
        memoryview(part).nbytes
        for part in encoded
        if np.shares_memory(np.frombuffer(part, np.uint8), backing)
    )
    assert viewed == data_HTD.nbytes
    assert _decode(geometry, encoded, Codec.RAW, np.float32).tobytes() == data_HTD.tobytes()


def test_raw_layout_is_the_one_the_geometry_implies():
    geometry, data_HTD = _case(8, 700, 128, "bfloat16")
    encoded = encode_shard(geometry, 0, data_HTD, Codec.RAW, KEY)
    assert encoded.num_bytes == geometry.raw_shard_bytes(0)
    assert np.array_equal(encoded.chunk_sizes, raw_chunk_sizes(geometry, 0))
    data = b"".join(bytes(part) for part in encoded)
    start, number = geometry.raw_chunk_offset(0, 1, 2), geometry.chunk_number(0, 1, 2)
    stored = data[start : start + geometry.raw_chunk_stride]
    chunk = decode_chunk(geometry, stored, Codec.RAW, DTYPES["bfloat16"], KEY, number)
    assert chunk[:, :188].tobytes() == data_HTD[4:8, 512:700].tobytes()


@pytest.mark.parametrize("codec", list(Codec))
def test_any_flipped_bit_of_a_chunk_raises(codec):
    geometry, data_HTD = _case(2, 300, 8, "float32")
    encoded = encode_shard(geometry, 0, data_HTD, codec, KEY)
    end = int(chunk_offsets(geometry, encoded.chunk_sizes)[1])
    stored = bytearray(b"".join(bytes(part) for part in encoded)[:end])
    for place in np.random.default_rng(2).integers(0, len(stored) * 8, 300).tolist():
        stored[place // 8] ^= 1 << place % 8
        with pytest.raises(DamagedObject, match=KEY):
            decode_chunk(geometry, stored, codec, np.dtype(np.float32), KEY, 0)
        stored[place // 8] ^= 1 << place % 8
    with pytest.raises(DamagedObject):
        decode_chunk(geometry, stored[:3], codec, np.dtype(np.float32), KEY, 0)


def test_a_frame_that_claims_another_size_is_refused_before_it_is_unpacked():
    geometry, data_HTD = _case(2, 300, 8, "float32")
    encoded = encode_shard(geometry, 0, data_HTD, Codec.FAST, KEY)
    frame = bytearray(next(iter(encoded)))
    frame[4:8] = (1 << 30).to_bytes(4, "little")
    stored = bytes(frame) + crc32c(frame).to_bytes(4, "little")
    geometry = replace(geometry, tags=False)
    with pytest.raises(DamagedObject, match="should hold"):
        decode_chunk(geometry, stored, Codec.FAST, np.dtype(np.float32), KEY, 0)


@pytest.mark.parametrize("codec", [Codec.FAST, Codec.SMALL])
def test_frames_made_up_by_an_attacker_are_damage_or_values_but_no_crash(codec):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(30_000).astype(np.float32)
    frame = compress(codec, values)
    out = np.empty(values.nbytes, np.uint8)
    refused = 0
    for _ in range(2000):
        forged = bytearray(frame)
        for place in rng.integers(0, 400, rng.integers(1, 6)).tolist():
            forged[place] = rng.integers(256)
        try:
            decompress(bytes(forged), out, "s")
        except DamagedObject:
            refused += 1
    assert refused > 0


def test_shards_of_one_shape_have_different_checksums():
    geometry, one = _case(2, 300, 8, "float32", seed=1)
    _, other = _case(2, 300, 8, "float32", seed=2)
    first, second = (encode_shard(geometry, 0, data, Codec.RAW, KEY) for data in (one, other))
    assert len(list(first)) == len(list(second))
    assert first.crc32c != second.crc32c


def test_the_checksum_is_of_the_parts_that_were_taken():
    geometry, data_HTD = _case(2, 300, 8, "float32")
    encoded = encode_shard(geometry, 0, data_HTD, Codec.RAW, KEY)
    parts = iter(encoded)
    next(parts)
    with pytest.raises(ValueError, match="not all taken"):
        _ = encoded.crc32c
    again = list(encoded)
    taken = encoded.crc32c
    assert b"".join(map(bytes, again)) == b"".join(map(bytes, encoded))
    assert encoded.crc32c == taken


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_in_order_give_the_same_shard(shape, codec):
    geometry, data_HTD = _case(*shape, "bfloat16")
    chunks = geometry.token_chunks_in_shard(0)
    tokens, size = data_HTD.shape[1:]
    padded_HTD = np.full((len(data_HTD), chunks * geometry.chunk_tokens, size), 7, data_HTD.dtype)
    padded_HTD[:, :tokens] = data_HTD
    cut = (geometry.groups_per_shard, geometry.group_heads, chunks, geometry.chunk_tokens, size)
    chunks_GCgtD = np.ascontiguousarray(padded_HTD.reshape(cut).swapaxes(1, 2))
    one = encode_shard(geometry, 0, data_HTD, codec, KEY)
    other = encode_chunks(geometry, 0, chunks_GCgtD, codec, KEY)
    assert b"".join(map(bytes, other)) == b"".join(map(bytes, one))
    assert (other.num_bytes, other.crc32c) == (one.num_bytes, one.crc32c)
    assert np.array_equal(other.chunk_sizes, one.chunk_sizes)
    with pytest.raises(ValueError, match="holds"):
        encode_chunks(geometry, 0, chunks_GCgtD[..., :-1], codec, KEY)


def test_the_wrong_array_is_refused():
    geometry, data_HTD = _case(4, 300, 8, "float32")
    with pytest.raises(ValueError, match="holds"):
        encode_shard(geometry, 0, data_HTD[:2], Codec.RAW, KEY)
    with pytest.raises(ValueError, match="holds"):
        encode_shard(geometry, 0, data_HTD.astype(np.float16), Codec.RAW, KEY)
    with pytest.raises(ValueError, match="contiguous"):
        encode_shard(geometry, 0, np.asfortranarray(data_HTD), Codec.RAW, KEY)


def test_chunk_sizes_survive_the_commit_and_wrong_ones_are_refused():
    geometry, data_HTD = _case(4, 700, 16, "float32")
    sizes = encode_shard(geometry, 0, data_HTD, Codec.SMALL, KEY).chunk_sizes
    text = pack_chunk_sizes(sizes)
    assert np.array_equal(unpack_chunk_sizes(text, geometry, 0, "s"), sizes)
    with pytest.raises(FormatError):
        unpack_chunk_sizes(text[:-4], geometry, 0, "s")
    with pytest.raises(FormatError):
        unpack_chunk_sizes("?" * len(text), geometry, 0, "s")
