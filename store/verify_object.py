"""Whether every byte of an object is what its commit says: chunks, tags, index, metadata."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from store.checksum import crc32c, hex_crc32c
from store.codec import DTYPES
from store.errors import DamagedObject, FormatError, RunError, StoreError
from store.objects.protocol import ObjectStore
from store.run_format import ArrayRecord, Commit, ObjectRecord
from store.shard import decode_chunk, stored_checksum
from store.shard_index import chunk_offsets, shard_checksum, shard_index
from store.zarr_metadata import metadata_problem

MAX_OBJECT_BYTES = 1 << 30


def shards_of(commit: Commit) -> Iterator[tuple[str, tuple[ArrayRecord, int]]]:
    """Yield the name of each shard that a commit must have, its array and its token shard."""
    for array in commit.arrays:
        try:
            geometry = array.geometry()
        except FormatError:
            continue
        if geometry.num_layers * geometry.num_token_shards * geometry.num_head_shards > len(
            commit.objects
        ):
            continue
        for layer, token_shard, head_shard in geometry.shard_places():
            yield array.shard_name(layer, token_shard, head_shard), (array, token_shard)


def object_problem(
    objects: ObjectStore,
    commit: Commit,
    prefix: str,
    shards: dict[str, tuple[ArrayRecord, int]],
    record: ObjectRecord,
) -> str | None:
    """Return what is wrong with one object of a commit, or None. Reads it whole."""
    if record.bytes > MAX_OBJECT_BYTES:
        return f"states {record.bytes} bytes, more than the {MAX_OBJECT_BYTES} allowed"
    try:
        data = objects.get(prefix + record.name, max_bytes=record.bytes)
        if len(data) != record.bytes:
            return f"has {len(data)} bytes where the commit says {record.bytes}"
        if record.name in shards:
            checksum = _shard_bytes_checksum(*shards[record.name], data, prefix, record.name)
        else:
            checksum = crc32c(data)
    except (RunError, StoreError) as error:
        return str(error)
    if hex_crc32c(checksum) != record.crc32c:
        return (
            f"its bytes give the checksum {hex_crc32c(checksum)}, the commit says {record.crc32c}"
        )
    return metadata_problem(data, commit, record.name)


def _shard_bytes_checksum(
    array: ArrayRecord, token_shard: int, data: bytes, prefix: str, name: str
) -> int:
    """Check every chunk, every tag and the index of a shard's bytes and return its checksum."""
    geometry = array.geometry()
    sizes = array.stored_sizes(geometry, token_shard, name)
    offsets = chunk_offsets(geometry, sizes).tolist()
    index = shard_index(geometry, token_shard, sizes)
    if len(data) != offsets[-1] + len(index) or data[-len(index) :] != index:
        raise DamagedObject(f"{name}: its index is not the one its chunks give")
    view = memoryview(data)
    dtype = DTYPES[array.dtype]
    checksums = bytearray()
    for number, (start, end) in enumerate(pairwise(offsets)):
        decode_chunk(geometry, view[start:end], array.codec, dtype, prefix + name, number)
        checksums += stored_checksum(geometry, view[start:end])
    return shard_checksum(np.frombuffer(checksums, "<u4"), index)
