"""One shard's bytes: its chunks, each ending in its crc32c, then the index. Knows no store, no
names.

Legend: H heads of the shard, T tokens of the array in the shard, D head size, g heads of a group.

The bytes follow Zarr v3's `sharding_indexed` codec with the index at the end, so any Zarr library
reads them; they are laid out here because Zarr leaves the physical order free and ours (head group
by head group, see `store.geometry`) makes one head group over all tokens one range, and because raw
values can then go from the caller's array to the file without being copied together.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import Buffer

from store.checksum import crc32c
from store.codec import Codec, compress, decompress
from store.errors import DamagedObject, FormatError
from store.geometry import CHECKSUM_BYTES, ArrayGeometry

ABSENT = (1 << 64) - 1
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """A shard ready to be put; `parts` may be views of the caller's array."""

    parts: list[Buffer]
    num_bytes: int
    crc32c: int
    """The shard's checksum as commits state it: see `shard_checksum`."""
    chunk_sizes: np.ndarray[Any, np.dtype[np.uint32]]
    """Stored bytes of each chunk, its crc32c included, in physical order."""


def encode_shard(
    geometry: ArrayGeometry, token_shard: int, data_HTD: np.ndarray[Any, Any], codec: Codec
) -> EncodedShard:
    """Return the bytes of one shard of heads [H, T, D], every head's [T, D] contiguous.

    For `raw` no value is copied: the parts are views. The last chunk is filled up with zeros.
    Raises `ValueError` if the array is not of the shape that `geometry` gives the shard.
    """
    rows_HB = _rows_of_bytes(geometry, token_shard, data_HTD)
    if codec is Codec.RAW:
        parts, sizes, checksums = _raw_chunks(geometry, token_shard, rows_HB)
    else:
        parts, sizes, checksums = _compressed_chunks(geometry, rows_HB, codec)
    return _finished(geometry, token_shard, parts, sizes, checksums)


def encode_chunks(
    geometry: ArrayGeometry, token_shard: int, chunks_GCgtD: np.ndarray[Any, Any], codec: Codec
) -> EncodedShard:
    """Return the bytes of one shard whose values already lie chunk by chunk.

    `chunks_GCgtD` is [head groups, chunks of tokens, heads of a group, chunk tokens, D]; each chunk
    is contiguous, groups may lie apart. Rows after the last token mean nothing: that chunk alone is
    copied, its rest filled with zeros. For `raw` all others are views, one checksum call each.
    """
    groups, chunks = geometry.groups_per_shard, geometry.token_chunks_in_shard(token_shard)
    expected = (groups, chunks, geometry.group_heads, geometry.chunk_tokens, geometry.head_size)
    item = chunks_GCgtD.dtype.itemsize
    if chunks_GCgtD.shape != expected or item != geometry.item_bytes:
        raise ValueError(
            f"token shard {token_shard} holds {expected} elements of {geometry.item_bytes} bytes, "
            f"got {chunks_GCgtD.shape} of {item} bytes"
        )
    rest = geometry.tokens_in_shard(token_shard) - (chunks - 1) * geometry.chunk_tokens
    parts: list[Buffer] = []
    sizes: list[int] = []
    checksums: list[int] = []
    for group_CgtD in chunks_GCgtD:
        if not group_CgtD.flags.c_contiguous:
            raise ValueError(f"a group's chunks must be contiguous, strides {chunks_GCgtD.strides}")
        for chunk_gtD in _whole_chunks(group_CgtD, rest):
            if codec is Codec.RAW:
                values_B: Any = chunk_gtD.reshape(-1).view(np.uint8)
                stored = memoryview(values_B)
            else:
                stored = memoryview(compress(codec, chunk_gtD))
            checksum = crc32c(stored)
            parts += (stored, _CRC.pack(checksum))
            sizes.append(stored.nbytes + CHECKSUM_BYTES)
            checksums.append(checksum)
    return _finished(geometry, token_shard, parts, sizes, checksums)


def _whole_chunks(group_CgtD: np.ndarray[Any, Any], rest: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield a group's chunks; the last, if only `rest` of its rows count, as a filled-up copy."""
    last = len(group_CgtD) - 1
    for number, chunk_gtD in enumerate(group_CgtD):
        if number == last and rest < chunk_gtD.shape[1]:
            filled_gtD = np.zeros_like(chunk_gtD)
            filled_gtD[:, :rest] = chunk_gtD[:, :rest]
            yield filled_gtD
        else:
            yield chunk_gtD


def _finished(
    geometry: ArrayGeometry,
    token_shard: int,
    parts: list[Buffer],
    sizes: list[int],
    checksums: list[int],
) -> EncodedShard:
    chunk_sizes = np.asarray(sizes, np.uint32)
    index = shard_index(geometry, token_shard, chunk_sizes)
    parts.append(index)
    return EncodedShard(
        parts=parts,
        num_bytes=int(chunk_sizes.sum(dtype=np.int64)) + len(index),
        crc32c=shard_checksum(np.asarray(checksums, "<u4"), index),
        chunk_sizes=chunk_sizes,
    )


def shard_index(
    geometry: ArrayGeometry, token_shard: int, chunk_sizes: np.ndarray[Any, np.dtype[np.uint32]]
) -> bytes:
    """Return the index that ends the shard: (offset, size) per chunk in C order, then a crc32c."""
    chunks = geometry.token_chunks_in_shard(token_shard)
    sizes = chunk_sizes.astype(np.uint64)
    offsets = np.concatenate(([np.uint64(0)], np.cumsum(sizes)[:-1])) if sizes.size else sizes
    index = np.full((geometry.token_chunks_per_shard, geometry.groups_per_shard, 2), ABSENT, "<u8")
    index[:chunks, :, 0] = offsets.reshape(geometry.groups_per_shard, chunks).T
    index[:chunks, :, 1] = sizes.reshape(geometry.groups_per_shard, chunks).T
    body = index.tobytes()
    return body + _CRC.pack(crc32c(body))


def shard_checksum(checksums: np.ndarray[Any, np.dtype[np.uint32]], index: Buffer) -> int:
    """Return the crc32c of the chunks' checksums (uint32, physical order) followed by the index.

    It stands for the whole object. A plain crc32c of the object would prove nothing: the crc32c of
    any bytes that end in their own crc32c is one constant, so it would depend on sizes alone and
    two shards of one shape could be exchanged unnoticed.
    """
    return crc32c(index, crc32c(checksums.astype("<u4", copy=False).tobytes()))


def raw_chunk_sizes(
    geometry: ArrayGeometry, token_shard: int
) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return the stored chunk sizes of a raw shard, which the geometry implies."""
    chunks = geometry.groups_per_shard * geometry.token_chunks_in_shard(token_shard)
    return np.full(chunks, geometry.chunk_bytes + CHECKSUM_BYTES, np.uint32)


def pack_chunk_sizes(chunk_sizes: np.ndarray[Any, np.dtype[np.uint32]]) -> str:
    """Return chunk sizes the way a commit carries them: base64 of little-endian uint32."""
    return base64.b64encode(chunk_sizes.astype("<u4").tobytes()).decode()


def unpack_chunk_sizes(
    text: str, geometry: ArrayGeometry, token_shard: int, name: str
) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return a commit's chunk sizes. Raises `FormatError` if they are not one per chunk."""
    expected = geometry.groups_per_shard * geometry.token_chunks_in_shard(token_shard)
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise FormatError(f"{name}: its chunk sizes are not base64 ({error})") from error
    if len(data) != 4 * expected:
        raise FormatError(f"{name}: {len(data)} bytes of chunk sizes for {expected} chunks")
    return np.frombuffer(data, "<u4")


def decode_chunk(
    geometry: ArrayGeometry, stored: Buffer, codec: Codec, dtype: np.dtype[Any], name: str
) -> np.ndarray[Any, Any]:
    """Return a chunk's values [g, chunk tokens, D] from its stored bytes, crc32c included.

    A raw chunk is a read-only view of `stored`. `name` is the shard's, for messages. Raises
    `DamagedObject` if the bytes do not match their checksum or are not exactly one chunk.
    """
    values = checked_chunk(stored, name)
    shape = (geometry.group_heads, geometry.chunk_tokens, geometry.head_size)
    if codec is Codec.RAW:
        if values.nbytes != geometry.chunk_bytes:
            raise DamagedObject(
                f"{name}: a raw chunk of {values.nbytes} bytes where {geometry.chunk_bytes} "
                "belong; run "
                "`attnstore verify`"
            )
        return np.frombuffer(values, dtype).reshape(shape)
    out = np.empty(geometry.chunk_bytes, np.uint8)
    decompress(values, out, name)
    return out.view(dtype).reshape(shape)


def checked_chunk(stored: Buffer, name: str) -> memoryview:
    """Return stored chunk bytes without their crc32c, after checking it. Raises `DamagedObject`."""
    view = memoryview(stored).cast("B")
    if view.nbytes <= CHECKSUM_BYTES:
        raise DamagedObject(f"{name}: a chunk of {view.nbytes} bytes; run `attnstore verify`")
    values, ending = view[:-CHECKSUM_BYTES], view[-CHECKSUM_BYTES:]
    stated, actual = _CRC.unpack(ending)[0], crc32c(values)
    if stated != actual:
        raise DamagedObject(
            f"{name}: a chunk's crc32c says {stated:08x}, its bytes give {actual:08x}; run "
            "`attnstore verify`"
        )
    return values


def _rows_of_bytes(
    geometry: ArrayGeometry, token_shard: int, data_HTD: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return the array as [H, T * row bytes] of uint8, a view of the same memory."""
    expected = (geometry.shard_heads, geometry.tokens_in_shard(token_shard), geometry.head_size)
    item = data_HTD.dtype.itemsize
    if data_HTD.shape != expected or item != geometry.item_bytes:
        raise ValueError(
            f"token shard {token_shard} holds {expected} elements of {geometry.item_bytes} bytes, "
            "got "
            f"{data_HTD.shape} of {item} bytes"
        )
    if expected[1] and not data_HTD[0].flags.c_contiguous:
        raise ValueError(
            f"each head's [tokens, D] must be contiguous, got strides {data_HTD.strides}"
        )
    rows_HTB = data_HTD.view(np.uint8)
    return rows_HTB.reshape(expected[0], expected[1] * expected[2] * item)


def _raw_chunks(
    geometry: ArrayGeometry, token_shard: int, rows_HB: np.ndarray[Any, Any]
) -> tuple[list[Buffer], list[int], list[int]]:
    span = geometry.chunk_tokens * geometry.head_size * geometry.item_bytes
    total = rows_HB.shape[1]
    filling = bytes(geometry.token_chunks_in_shard(token_shard) * span - total)
    heads = [memoryview(rows_HB[head]) for head in range(geometry.shard_heads)]
    parts: list[Buffer] = []
    checksums: list[int] = []
    for first_head in range(0, geometry.shard_heads, geometry.group_heads):
        group = heads[first_head : first_head + geometry.group_heads]
        for start in range(0, total, span):
            end = start + span
            pieces: list[Buffer] = [head[start:end] for head in group]
            if end > total:
                pieces = [piece for head in pieces for piece in (head, filling)]
            checksum = 0
            for piece in pieces:
                checksum = crc32c(piece, checksum)
            parts += pieces
            parts.append(_CRC.pack(checksum))
            checksums.append(checksum)
    return parts, [geometry.chunk_bytes + CHECKSUM_BYTES] * len(checksums), checksums


def _compressed_chunks(
    geometry: ArrayGeometry, rows_HB: np.ndarray[Any, Any], codec: Codec
) -> tuple[list[Buffer], list[int], list[int]]:
    span = geometry.chunk_tokens * geometry.head_size * geometry.item_bytes
    total = rows_HB.shape[1]
    parts: list[Buffer] = []
    sizes: list[int] = []
    checksums: list[int] = []
    scratch_gB = np.empty((geometry.group_heads, span), np.uint8)
    element = np.dtype(f"V{geometry.item_bytes}")
    for first_head in range(0, geometry.shard_heads, geometry.group_heads):
        group_gB = rows_HB[first_head : first_head + geometry.group_heads]
        for start in range(0, total, span):
            width = min(span, total - start)
            scratch_gB[:, :width] = group_gB[:, start : start + width]
            scratch_gB[:, width:] = 0
            frame = compress(codec, scratch_gB.view(element))
            checksum = crc32c(frame)
            parts += (frame, _CRC.pack(checksum))
            sizes.append(len(frame) + CHECKSUM_BYTES)
            checksums.append(checksum)
    return parts, sizes, checksums
