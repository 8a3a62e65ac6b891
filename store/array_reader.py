"""Reads parts of one unit's arrays: plan, fetch, check every checksum, put each value in its place.

Knows an object store, an attempt's folder and array records; never knows prompts or labels. A
chunk that is missing, short or does not match its crc32c raises `DamagedObject`: there is no path
on which an unread value comes back as zero. Objects are read at the same time, at most
`max_in_flight_bytes` of them at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from store.ahead import Begun
from store.chunk_cache import ChunkCache
from store.codec import DTYPES
from store.errors import DamagedObject, ObjectNotFound
from store.explain import ReadCost
from store.objects.protocol import ObjectStore
from store.read_plan import (
    ChunkLayout,
    ChunkRead,
    CostModel,
    ObjectRead,
    coalesce,
    plan_chunks,
)
from store.replaced import why_gone
from store.selection import integer
from store.shard import decode_chunk, stored_checksum

Indices = NDArray[np.int64]
T = TypeVar("T")

_MOST_PROVEN = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a run is read; nothing here changes what is read."""

    threads: int = 8
    max_in_flight_bytes: int = 256 << 20
    cache_bytes: int = 128 << 20
    deadline_seconds: float = 600.0
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        for name, least in (("threads", 1), ("max_in_flight_bytes", 1), ("cache_bytes", 0)):
            given = integer(getattr(self, name))
            if given is None or given < least:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: give a whole number from {least} up"
                )
        if not self.deadline_seconds > 0:
            raise ValueError(f"deadline_seconds={self.deadline_seconds!r}: give more than 0")


class ByteBudget:
    """Lets at most `max_bytes` be in flight; a larger single read goes alone."""

    def __init__(self, max_bytes: int, deadline_seconds: float) -> None:
        self._max_bytes = max_bytes
        self._deadline_seconds = deadline_seconds
        self._used = 0
        self._freed = threading.Condition()

    def acquire(self, count: int) -> None:
        """Wait for room. Raises `TimeoutError` after the deadline."""
        deadline = time.monotonic() + self._deadline_seconds
        with self._freed:
            while self._used and self._used + count > self._max_bytes:
                left = deadline - time.monotonic()
                if left <= 0 or not self._freed.wait(left):
                    raise TimeoutError(
                        f"no room for a read of {count} bytes within {self._deadline_seconds:.0f} s"
                    )
            self._used += count

    def release(self, count: int) -> None:
        """Give room back."""
        with self._freed:
            self._used -= count
            self._freed.notify_all()


@dataclass(frozen=True, slots=True)
class _Part:
    """One read's array and where its values go."""

    prefix: str
    layout: ChunkLayout
    out_LHTD: NDArray[Any]  # noqa: N815
    places: Indices | None = None

    def decode(self, stored: memoryview, name: str, number: int) -> NDArray[Any]:
        record, geometry = self.layout.record, self.layout.geometry
        return decode_chunk(geometry, stored, record.codec, DTYPES[record.dtype], name, number)

    def place(self, values_gTD: NDArray[Any], chunk: ChunkRead) -> None:
        """Copy the wanted part of a chunk to its places in the answer."""
        rows = chunk.out_rows if self.places is None else self.places[chunk.out_rows]
        in_rows, out_rows = _as_slice(chunk.in_rows), _as_slice(rows)
        for layer in chunk.out_layers:
            for out_head, in_head in zip(chunk.out_heads, chunk.in_heads, strict=True):
                self.out_LHTD[layer, out_head, out_rows] = values_gTD[in_head, in_rows]


class ArrayReader:
    """Reads arrays of any unit of one run through shared threads, cache and byte bound."""

    def __init__(self, objects: ObjectStore, options: ReadOptions) -> None:
        self._objects = objects
        self._options = options
        self._cache = ChunkCache(options.cache_bytes)
        self._budget = ByteBudget(options.max_in_flight_bytes, options.deadline_seconds)
        self._proven: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    @property
    def cache(self) -> ChunkCache:
        return self._cache

    def read(
        self,
        prefix: str,
        layout: ChunkLayout,
        layers: Indices,
        heads: Indices,
        rows: Indices,
    ) -> NDArray[Any]:
        """Return the values [L, H, T, D] of the selection, in its order and the stored dtype.

        `prefix` is the attempt's folder; the selection holds indices into the array. Raises
        `DamagedObject` naming the object if any chunk is missing, short or altered.
        """
        shape = (len(layers), len(heads), len(rows), layout.geometry.head_size)
        out_LHTD = np.empty(shape, DTYPES[layout.record.dtype])
        self._read(_Part(prefix, layout, out_LHTD), layers, heads, rows, use_cache=True)
        return out_LHTD

    def read_into(
        self,
        prefix: str,
        layout: ChunkLayout,
        layers: Indices,
        heads: Indices,
        rows: Indices,
        out_LHTD: NDArray[Any],
        places: Indices | None = None,
    ) -> None:
        """Read as `read` does into `out_LHTD`, row i of the selection at row `places[i]`.

        For streams: values go from their chunk to where they are wanted in one copy, and the cache
        is left alone. Values are converted to the dtype of `out_LHTD`.
        """
        part = _Part(prefix, layout, out_LHTD, places)
        self._read(part, layers, heads, rows, use_cache=False)

    def _read(
        self, part: _Part, layers: Indices, heads: Indices, rows: Indices, *, use_cache: bool
    ) -> None:
        wanted: list[ChunkRead] = []
        for chunk in plan_chunks(part.layout, layers, heads, rows):
            key = (part.prefix + chunk.shard, chunk.start)
            cached = self._cache.get(key) if use_cache else None
            if cached is None:
                wanted.append(chunk)
            else:
                part.place(cached, chunk)
        self._fetch(part, coalesce(wanted, self._options.cost), use_cache)

    def cost_of(
        self, layout: ChunkLayout, layers: Indices, heads: Indices, rows: Indices
    ) -> ReadCost:
        """Return what `read` of the same would cost with nothing cached; reads nothing."""
        reads = coalesce(plan_chunks(layout, layers, heads, rows), self._options.cost)
        geometry = layout.geometry
        values = len(layers) * len(heads) * len(rows) * geometry.head_size
        return ReadCost.of(reads, values * geometry.item_bytes)

    def map(self, function: Any, items: Sequence[Any]) -> list[Any]:
        """Return `function` of each item, in order, run on the reading threads."""
        if len(items) <= 1:
            return [function(item) for item in items]
        return list(self._threads().map(function, items))

    def begin(self, call: Callable[[], T]) -> Begun[T]:
        """Begin a call on a reading thread; over local files, where it never waits, put it off."""
        is_local = getattr(self._objects, "small_ranges_are_cheap", False)
        return Begun(call, None if is_local else self._threads())

    def _fetch(self, part: _Part, reads: Sequence[ObjectRead], use_cache: bool) -> None:
        def fetch_one(read: ObjectRead) -> None:
            self._budget.acquire(read.bytes)
            try:
                self._fetch_object(part, read, use_cache)
            finally:
                self._budget.release(read.bytes)

        self.map(fetch_one, reads)

    def _fetch_object(self, part: _Part, read: ObjectRead, use_cache: bool) -> None:
        name = part.prefix + read.shard
        try:
            answers = self._objects.get_ranges(name, [one.range for one in read.ranges])
        except ObjectNotFound as error:
            raise DamagedObject(why_gone(self._objects, name)) from error
        checksums: list[tuple[int, bytes]] = []
        decoded: list[tuple[int, NDArray[Any]]] = []
        for one, data in zip(read.ranges, answers, strict=True):
            if len(data) != one.range.length:
                raise DamagedObject(
                    f"{name}: {len(data)} bytes where {one.range.length} were asked for; "
                    "run `attnstore verify`"
                )
            view = memoryview(data)
            for chunk in one.chunks:
                start = chunk.start - one.range.start
                stored = view[start : start + chunk.length]
                values = part.decode(stored, name, chunk.number)
                checksums.append((chunk.start, stored_checksum(part.layout.geometry, stored)))
                part.place(values, chunk)
                decoded.append((chunk.start, values))
        self._prove(part.layout, name, read.ranges[0].chunks[0], checksums)
        if use_cache:
            for start, values in decoded:
                self._cache.put((name, start), values)

    def _prove(
        self, layout: ChunkLayout, name: str, any_chunk: ChunkRead, read: list[tuple[int, bytes]]
    ) -> None:
        """Check that the shard is the commit's own, from all its chunks' (start, crc32c) in order.

        A tag tells a chunk from those of other places, but not from one that was written for the
        same place at another time; arrays of the first runs have no tags. Where small ranges are
        cheap the checksums that were not read are fetched, once a shard; elsewhere a read of part
        of a shard leaves this to `verify --deep`.
        """
        shard, token_shard = any_chunk.shard, any_chunk.token_shard
        if name in self._proven:
            return
        checksums = dict(read)
        if len(checksums) < layout.geometry.num_chunks(token_shard):
            if not getattr(self._objects, "small_ranges_are_cheap", False):
                return
            starts, ranges = layout.other_checksums(shard, token_shard, checksums)
            answers = self._objects.get_ranges(name, ranges)
            checksums.update(zip(starts, answers, strict=True))
        layout.check_whole(shard, token_shard, [crc for _, crc in sorted(checksums.items())])
        if len(self._proven) >= _MOST_PROVEN:
            self._proven.clear()
        self._proven.add(name)

    def _threads(self) -> ThreadPoolExecutor:
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self._options.threads, thread_name_prefix="attnstore-read"
                )
            return self._pool


def _as_slice(indices: Indices) -> slice | Indices:
    """Return consecutive ascending indices as a slice, which copies several times faster."""
    if len(indices) and int(indices[-1]) - int(indices[0]) == len(indices) - 1:
        first = int(indices[0])
        if np.array_equal(indices, np.arange(first, first + len(indices))):
            return slice(first, first + len(indices))
    return indices
