"""From a selection in one unit's array to the fewest byte ranges that answer it. Pure; no I/O.

Knows an `ArrayRecord` (the cut of the array, the stored sizes of its chunks) and three lists of
indices; never knows labels, prompts or stores. A chunk is the smallest piece that carries a
checksum, so whole chunks are read, each once, however many rows of it are wanted.

Cost model. A request costs as much as moving `request_bytes` bytes, and requests are issued at the
same time, so two ranges of one object are joined when the gap between them is at most that. Chunks
lie head-group-major: a head group's neighbouring token chunks always touch, and join for nothing.
The default joins over no gap: a gap here is at least a chunk (256 KiB at head size 128 in
bfloat16), which at 100 MB/s takes longer than the latency that it would hide behind.

Legend: L layers, H heads and T tokens (rows) of the answer [L, H, T, D].
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from store.checksum import hex_crc32c
from store.codec import Codec
from store.errors import DamagedObject, FormatError
from store.geometry import CHECKSUM_BYTES, ArrayGeometry
from store.objects.protocol import ByteRange
from store.run_format import ArrayRecord
from store.shard_index import chunk_offsets, shard_checksum, shard_index

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a request is worth in bytes; ranges with a smaller gap are joined."""

    request_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One stored chunk and the part of the answer that it fills.

    `out_heads` and `out_rows` are places in the answer, `in_heads` and `in_rows` the places inside
    the chunk that go there.
    """

    shard: str
    token_shard: int
    start: int
    length: int
    layer: int
    group: int
    token_chunk: int
    number: int
    """The chunk's place in the physical order of its shard."""
    out_layers: tuple[int, ...]
    out_heads: Indices
    out_rows: Indices
    in_heads: Indices
    in_rows: Indices

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class RangeRead:
    """One byte range of an object and the chunks inside it, ascending."""

    range: ByteRange
    chunks: tuple[ChunkRead, ...]


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """Everything to read from one object: one call to `ObjectStore.get_ranges`."""

    shard: str
    ranges: tuple[RangeRead, ...]

    @property
    def bytes(self) -> int:
        return sum(part.range.length for part in self.ranges)


class ChunkLayout:
    """Where the chunks of one array lie in its shards; decodes the commit's sizes once."""

    def __init__(self, record: ArrayRecord, checksums: Mapping[str, str] | None = None) -> None:
        self.record = record
        self._checksums = checksums or {}
        self.geometry: ArrayGeometry = record.geometry()
        self._offsets: dict[str, Indices] = {}

    def locate(self, shard: str, token_shard: int, group: int, token_chunk: int) -> tuple[int, int]:
        """Return a chunk's (start, length) in its shard, its crc32c and its tag included."""
        geometry = self.geometry
        if self.record.codec is Codec.RAW:
            start = geometry.raw_chunk_offset(token_shard, group, token_chunk)
            return start, geometry.raw_chunk_stride
        offsets = self._offsets.get(shard)
        if offsets is None:
            offsets = self._offsets[shard] = self._decode_offsets(shard, token_shard)
        number = geometry.chunk_number(token_shard, group, token_chunk)
        return int(offsets[number]), int(offsets[number + 1] - offsets[number])

    def other_checksums(
        self, shard: str, token_shard: int, known: Container[int]
    ) -> tuple[list[int], list[ByteRange]]:
        """Return the starts of the shard's other chunks, and where each one's crc32c lies."""
        offsets = self._decode_offsets(shard, token_shard).tolist()
        before = CHECKSUM_BYTES + self.geometry.tag_bytes
        others = [(start, end - before) for start, end in pairwise(offsets) if start not in known]
        ranges = [ByteRange(at, CHECKSUM_BYTES) for _, at in others]
        return [start for start, _ in others], ranges

    def check_whole(self, shard: str, token_shard: int, checksums: Sequence[bytes]) -> None:
        """Check that a shard's chunks, whose crc32c bytes are given in order, are the commit's.

        A chunk's own crc32c tells that it is whole, not that it is this shard's: two shards of one
        shape may have been exchanged. Raises `DamagedObject`.
        """
        stated = self._checksums.get(shard)
        if stated is None:
            return
        sizes = self.record.stored_sizes(self.geometry, token_shard, shard)
        index = shard_index(self.geometry, token_shard, sizes)
        found = hex_crc32c(shard_checksum(np.frombuffer(b"".join(checksums), "<u4"), index))
        if found != stated:
            raise DamagedObject(
                f"{shard}: its chunks give the checksum {found}, the commit says {stated}: "
                "these are another shard's; run `attnstore verify --deep`"
            )

    def _decode_offsets(self, shard: str, token_shard: int) -> Indices:
        sizes = self.record.stored_sizes(self.geometry, token_shard, shard)
        if len(sizes) and int(sizes.min()) <= CHECKSUM_BYTES:
            raise FormatError(f"the commit gives {shard} a chunk of {sizes.min()} bytes")
        return chunk_offsets(self.geometry, sizes)


def plan_chunks(
    layout: ChunkLayout, layers: Indices, heads: Indices, rows: Indices
) -> list[ChunkRead]:
    """Return the chunks that hold the selection, each once, in storage order.

    `layers`, `heads` and `rows` are indices into the array, in the order of the answer; any may
    repeat or be empty. Raises `IndexError` for an index outside the array.
    """
    geometry = layout.geometry
    _check("layer", layers, geometry.num_layers)
    _check("head", heads, geometry.num_heads)
    _check("row", rows, geometry.num_tokens)
    head_groups = _split(heads, geometry.group_heads)
    row_chunks = _split(rows, geometry.chunk_tokens)
    chunks: list[ChunkRead] = []
    for layer, out_layers, _ in _split(layers, 1):
        for chunk, out_rows, in_rows in row_chunks:
            token_shard, token_chunk = divmod(chunk, geometry.token_chunks_per_shard)
            for group_of_all, out_heads, in_heads in head_groups:
                head_shard, group = divmod(group_of_all, geometry.groups_per_shard)
                shard = layout.record.shard_name(layer, token_shard, head_shard)
                start, length = layout.locate(shard, token_shard, group, token_chunk)
                chunks.append(
                    ChunkRead(
                        shard=shard,
                        token_shard=token_shard,
                        start=start,
                        length=length,
                        layer=layer,
                        group=group,
                        token_chunk=token_chunk,
                        number=geometry.chunk_number(token_shard, group, token_chunk),
                        out_layers=tuple(out_layers.tolist()),
                        out_heads=out_heads,
                        out_rows=out_rows,
                        in_heads=in_heads,
                        in_rows=in_rows,
                    )
                )
    return chunks


def coalesce(chunks: Iterable[ChunkRead], cost: CostModel = CostModel()) -> list[ObjectRead]:
    """Group chunks into ranges and ranges into one call an object, by the cost model."""
    by_shard: dict[str, list[ChunkRead]] = {}
    for chunk in chunks:
        by_shard.setdefault(chunk.shard, []).append(chunk)
    return [
        ObjectRead(shard, tuple(_ranges(sorted(held, key=lambda chunk: chunk.start), cost)))
        for shard, held in by_shard.items()
    ]


def _ranges(chunks: Sequence[ChunkRead], cost: CostModel) -> list[RangeRead]:
    ranges: list[RangeRead] = []
    joined: list[ChunkRead] = []
    for chunk in chunks:
        if joined and chunk.start - joined[-1].stop > cost.request_bytes:
            ranges.append(_range(joined))
            joined = []
        joined.append(chunk)
    if joined:
        ranges.append(_range(joined))
    return ranges


def _range(chunks: list[ChunkRead]) -> RangeRead:
    start = chunks[0].start
    return RangeRead(ByteRange(start, chunks[-1].stop - start), tuple(chunks))


def _split(indices: Indices, size: int) -> list[tuple[int, Indices, Indices]]:
    """Return (block, places in the answer, places in the block) for each touched block."""
    blocks = indices // size
    parts = []
    for block in np.unique(blocks):
        places = np.flatnonzero(blocks == block)
        parts.append((int(block), places, indices[places] - int(block) * size))
    return parts


def _check(what: str, indices: Indices, size: int) -> None:
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= size):
        raise IndexError(f"{what} indices {indices.min()}..{indices.max()} in an array of {size}")
