"""One shard's bytes: its chunks, each ending in its crc32c and followed by its tag, then the index.
Knows no store.

Legend: H heads of the shard, T tokens of the array in the shard, D head size, g heads of a group.

The bytes follow Zarr v3's `sharding_indexed` codec with the index at the end, so any Zarr library
reads them; they are laid out here because Zarr leaves the physical order free and ours (head group
by head group, see `store.geometry`) makes one head group over all tokens one range, and because raw
values can then go from the caller's array to the file without being copied together.

A chunk's crc32c tells that it is whole, not that it is in its place. The **tag** tells that: the
crc32c of the shard's name relative to the run, the chunk's number in it and the chunk's crc32c. It
lies between the chunks, where Zarr allows gaps, so that other libraries never meet it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import Buffer

from store.checksum import crc32c, crc32c_of_parts
from store.codec import Codec, compress, decompress
from store.errors import DamagedObject
from store.geometry import CHECKSUM_BYTES, ArrayGeometry
from store.shard_index import raw_chunk_sizes, shard_checksum, shard_index

_CRC = struct.Struct("<I")
_TWO = struct.Struct("<II")


Pieces = Callable[[], Iterable[Sequence[Buffer]]]
"""Gives a shard's chunks from the first on, each as the pieces it is stored as."""


class EncodedShard:
    """A shard ready to be put. Iterating yields its bytes in parts, views of the caller's array.

    A chunk's checksum is computed when its turn comes, so that a writer that takes part after part
    finds the chunk still in the processor's cache: its memory is read once instead of twice.
    Iterating again yields the same parts, as long as the caller's array stays as it is.
    """

    __slots__ = ("_checksums", "_geometry", "_pieces", "_token_shard", "chunk_sizes", "key")

    def __init__(
        self,
        geometry: ArrayGeometry,
        token_shard: int,
        key: str,
        chunk_sizes: np.ndarray[Any, np.dtype[np.uint32]],
        pieces: Pieces,
    ) -> None:
        self._geometry, self._token_shard, self._pieces = geometry, token_shard, pieces
        self._checksums: np.ndarray[Any, Any] | None = None
        self.key = key
        """The name relative to the run that the shard was encoded for."""
        self.chunk_sizes = chunk_sizes
        """Stored bytes of each chunk, its crc32c included, in physical order."""

    def __iter__(self) -> Iterator[Buffer]:
        geometry, named = self._geometry, crc32c(self.key.encode())
        checksums: list[int] = []
        for number, pieces in enumerate(self._pieces()):
            checksum = crc32c_of_parts(pieces)
            yield from pieces
            if geometry.tags:
                yield _TWO.pack(checksum, _tag(named, number, checksum))
            else:
                yield _CRC.pack(checksum)
            checksums.append(checksum)
        yield self._index
        self._checksums = np.asarray(checksums, "<u4")

    @property
    def num_bytes(self) -> int:
        """How many bytes iterating yields."""
        tags = len(self.chunk_sizes) * self._geometry.tag_bytes
        return int(self.chunk_sizes.sum(dtype=np.int64)) + tags + len(self._index)

    @property
    def crc32c(self) -> int:
        """The shard's checksum as commits state it (see `shard_checksum`), of the parts yielded."""
        if self._checksums is None:
            raise ValueError(f"the parts of {self.key} were not all taken: its checksum is unknown")
        return shard_checksum(self._checksums, self._index)

    @property
    def _index(self) -> bytes:
        return shard_index(self._geometry, self._token_shard, self.chunk_sizes)


def encode_shard(
    geometry: ArrayGeometry,
    token_shard: int,
    data_HTD: np.ndarray[Any, Any],
    codec: Codec,
    key: str,
) -> EncodedShard:
    """Return the bytes of one shard of heads [H, T, D], every head's [T, D] contiguous.

    `key` is the shard's name relative to the run. For `raw` no value is copied: the parts are
    views. The last chunk is filled up with zeros. Raises `ValueError` if the array is not of the
    shape that `geometry` gives the shard.
    """
    rows_HB = _rows_of_bytes(geometry, token_shard, data_HTD)
    pieces = _raw_pieces if codec is Codec.RAW else _compressed_pieces
    return _encoded(geometry, token_shard, key, codec, partial(pieces, geometry, rows_HB, codec))


def encode_chunks(
    geometry: ArrayGeometry,
    token_shard: int,
    chunks_GCgtD: np.ndarray[Any, Any],
    codec: Codec,
    key: str,
) -> EncodedShard:
    """Return the bytes of one shard whose values already lie chunk by chunk.

    `chunks_GCgtD` is [head groups, chunks of tokens, heads of a group, chunk tokens, D]; each chunk
    is contiguous, groups may lie apart. Rows after the last token mean nothing: that chunk alone is
    copied, its rest filled with zeros. For `raw` all others are views, one checksum call each.
    """
    groups, chunks = geometry.groups_per_shard, geometry.token_chunks_in_shard(token_shard)
    expected = (groups, chunks, geometry.group_heads, geometry.chunk_tokens, geometry.head_size)
    _check_shape(geometry, token_shard, chunks_GCgtD, expected)
    if not all(group_CgtD.flags.c_contiguous for group_CgtD in chunks_GCgtD):
        raise ValueError(f"a group's chunks must be contiguous, strides {chunks_GCgtD.strides}")
    rest = geometry.tokens_in_shard(token_shard) - (chunks - 1) * geometry.chunk_tokens

    def pieces() -> Iterator[Sequence[Buffer]]:
        for group_CgtD in chunks_GCgtD:
            for chunk_gtD in _whole_chunks(group_CgtD, rest):
                if codec is Codec.RAW:
                    values_B: Any = chunk_gtD.reshape(-1).view(np.uint8)
                    yield (memoryview(values_B),)
                else:
                    yield (compress(codec, chunk_gtD),)

    return _encoded(geometry, token_shard, key, codec, pieces)


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


def _encoded(
    geometry: ArrayGeometry, token_shard: int, key: str, codec: Codec, pieces: Pieces
) -> EncodedShard:
    """Return the shard of these chunks; compressed ones are kept, since their sizes are asked."""
    if codec is Codec.RAW:
        sizes = raw_chunk_sizes(geometry, token_shard)
        return EncodedShard(geometry, token_shard, key, sizes, pieces)
    frames = list(pieces())
    sizes = np.asarray(
        [sum(memoryview(piece).nbytes for piece in frame) + CHECKSUM_BYTES for frame in frames],
        np.uint32,
    )
    return EncodedShard(geometry, token_shard, key, sizes, lambda: frames)


def _tag(named: int, number: int, checksum: int) -> int:
    """Return a chunk's tag; `named` is the crc32c of its shard's name relative to the run."""
    return crc32c(_TWO.pack(number, checksum), named)


def decode_chunk(
    geometry: ArrayGeometry,
    stored: Buffer,
    codec: Codec,
    dtype: np.dtype[Any],
    key: str,
    number: int,
) -> np.ndarray[Any, Any]:
    """Return a chunk's values [g, chunk tokens, D] from its stored bytes, crc32c and tag included.

    A raw chunk is a read-only view of `stored`. `key` is the shard's name relative to the run,
    `number` the chunk's in it. Raises `DamagedObject` if the bytes do not match their checksum, are
    not exactly one chunk, or were written for another place.
    """
    values = _checked_chunk(geometry, stored, key, number)
    shape = (geometry.group_heads, geometry.chunk_tokens, geometry.head_size)
    if codec is Codec.RAW:
        if values.nbytes != geometry.chunk_bytes:
            raise DamagedObject(
                f"{key}: a raw chunk of {values.nbytes} bytes where {geometry.chunk_bytes} "
                "belong; run `attnstore verify`"
            )
        return np.frombuffer(values, dtype).reshape(shape)
    out = np.empty(geometry.chunk_bytes, np.uint8)
    decompress(values, out, key)
    return out.view(dtype).reshape(shape)


def stored_checksum(geometry: ArrayGeometry, stored: Buffer) -> bytes:
    """Return the 4 crc32c bytes of a chunk's stored bytes, tag included, unchecked."""
    end = memoryview(stored).nbytes - geometry.tag_bytes
    return bytes(memoryview(stored)[end - CHECKSUM_BYTES : end])


def _checked_chunk(geometry: ArrayGeometry, stored: Buffer, key: str, number: int) -> memoryview:
    """Return stored chunk bytes without crc32c and tag, after checking both."""
    view = memoryview(stored).cast("B")
    end = view.nbytes - geometry.tag_bytes
    if end <= CHECKSUM_BYTES:
        raise DamagedObject(f"{key}: a chunk of {view.nbytes} bytes; run `attnstore verify`")
    values = view[: end - CHECKSUM_BYTES]
    stated, actual = _CRC.unpack_from(view, end - CHECKSUM_BYTES)[0], crc32c(values)
    if stated != actual:
        raise DamagedObject(
            f"{key}: a chunk's crc32c says {stated:08x}, its bytes give {actual:08x}; run "
            "`attnstore verify`"
        )
    if geometry.tags:
        tag, due = _CRC.unpack_from(view, end)[0], _tag(crc32c(key.encode()), number, actual)
        if tag != due:
            raise DamagedObject(
                f"{key}: what lies in the place of chunk {number} is tagged {tag:08x}, not "
                f"{due:08x}: it is another chunk's or another shard's; run `attnstore verify "
                "--deep`"
            )
    return values


def _check_shape(
    geometry: ArrayGeometry,
    token_shard: int,
    values: np.ndarray[Any, Any],
    expected: tuple[int, ...],
) -> None:
    item = values.dtype.itemsize
    if values.shape != expected or item != geometry.item_bytes:
        raise ValueError(
            f"token shard {token_shard} holds {expected} elements of {geometry.item_bytes} bytes, "
            f"got {values.shape} of {item} bytes"
        )


def _rows_of_bytes(
    geometry: ArrayGeometry, token_shard: int, data_HTD: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return the array as [H, T * row bytes] of uint8, a view of the same memory."""
    tokens, size = geometry.tokens_in_shard(token_shard), geometry.head_size
    _check_shape(geometry, token_shard, data_HTD, (geometry.shard_heads, tokens, size))
    if tokens and not data_HTD[0].flags.c_contiguous:
        raise ValueError(
            f"each head's [tokens, D] must be contiguous, got strides {data_HTD.strides}"
        )
    rows_HTB = data_HTD.view(np.uint8)
    return rows_HTB.reshape(geometry.shard_heads, tokens * size * geometry.item_bytes)


def _spans(
    geometry: ArrayGeometry, rows_HB: np.ndarray[Any, Any]
) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    """Yield each chunk's rows [g, bytes] in physical order, and the bytes missing at their ends."""
    span = geometry.chunk_bytes // geometry.group_heads
    total = rows_HB.shape[1]
    for first_head in range(0, geometry.shard_heads, geometry.group_heads):
        for start in range(0, total, span):
            rows_gB = rows_HB[first_head : first_head + geometry.group_heads, start : start + span]
            yield rows_gB, span - rows_gB.shape[1]


def _raw_pieces(
    geometry: ArrayGeometry, rows_HB: np.ndarray[Any, Any], _: Codec
) -> Iterator[Sequence[Buffer]]:
    for rows_gB, missing in _spans(geometry, rows_HB):
        heads = [memoryview(row_B) for row_B in rows_gB]
        yield [piece for head in heads for piece in (head, bytes(missing))] if missing else heads


def _compressed_pieces(
    geometry: ArrayGeometry, rows_HB: np.ndarray[Any, Any], codec: Codec
) -> Iterator[Sequence[Buffer]]:
    scratch_gB = np.empty(
        (geometry.group_heads, geometry.chunk_bytes // geometry.group_heads), np.uint8
    )
    element = np.dtype(f"V{geometry.item_bytes}")
    for rows_gB, missing in _spans(geometry, rows_HB):
        held = scratch_gB.shape[1] - missing
        scratch_gB[:, :held] = rows_gB
        scratch_gB[:, held:] = 0
        yield (compress(codec, scratch_gB.view(element)),)
