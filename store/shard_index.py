"""Where the chunks of a shard lie: stored sizes, offsets, the index, and the checksum of it all.

Legend: physical order is head group by head group, each by token. Knows no values and no store.
"""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Any

import numpy as np
from typing_extensions import Buffer

from store.checksum import crc32c
from store.errors import FormatError
from store.geometry import CHECKSUM_BYTES, ArrayGeometry

ABSENT = (1 << 64) - 1
_CRC = struct.Struct("<I")


def chunk_offsets(
    geometry: ArrayGeometry, chunk_sizes: np.ndarray[Any, np.dtype[np.uint32]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return where each chunk begins in its shard, in physical order, and where the index does."""
    strides = chunk_sizes.astype(np.int64) + geometry.tag_bytes
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(strides)))


def shard_index(
    geometry: ArrayGeometry, token_shard: int, chunk_sizes: np.ndarray[Any, np.dtype[np.uint32]]
) -> bytes:
    """Return the index that ends the shard: (offset, size) per chunk in C order, then a crc32c."""
    chunks = geometry.token_chunks_in_shard(token_shard)
    offsets = chunk_offsets(geometry, chunk_sizes)[:-1]
    index = np.full((geometry.token_chunks_per_shard, geometry.groups_per_shard, 2), ABSENT, "<u8")
    index[:chunks, :, 0] = offsets.reshape(geometry.groups_per_shard, chunks).T
    index[:chunks, :, 1] = chunk_sizes.reshape(geometry.groups_per_shard, chunks).T
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
    return np.full(
        geometry.num_chunks(token_shard), geometry.chunk_bytes + CHECKSUM_BYTES, np.uint32
    )


def pack_chunk_sizes(chunk_sizes: np.ndarray[Any, np.dtype[np.uint32]]) -> str:
    """Return chunk sizes the way a commit carries them: base64 of little-endian uint32."""
    return base64.b64encode(chunk_sizes.astype("<u4").tobytes()).decode()


def unpack_chunk_sizes(
    text: str, geometry: ArrayGeometry, token_shard: int, name: str
) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return a commit's chunk sizes. Raises `FormatError` if they are not one per chunk."""
    expected = geometry.num_chunks(token_shard)
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise FormatError(f"{name}: its chunk sizes are not base64 ({error})") from error
    if len(data) != 4 * expected:
        raise FormatError(f"{name}: {len(data)} bytes of chunk sizes for {expected} chunks")
    return np.frombuffer(data, "<u4")
