"""Staged rows become durable shards, and a ledger proves that none is missing.

Every tap (one site of one layer) belongs to one writer thread, so all its rows meet in order and
a row computed twice (preemption) is replaced by its later self. Rows that fill a shard by
themselves are encoded straight from the slab; others meet in a shard buffer, whose `seen` marks are
the ledger. A shard leaves once every row is there. Sealing a unit asks each thread whether all of
its shards left; a unit with a shard that did not fails, naming the first row missing.

It knows no torch and no engine: slabs come in as numpy.

Shape legend: G head groups, C chunks (or tiles) of tokens, g heads of a group, t tokens of a chunk,
D head size.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from capture.errors import RowsMissing
from capture.rows import Run, UnitLayout
from capture.staging import Entry, Slab
from store.attempt import AttemptWriter
from store.codec import Codec
from store.geometry import ArrayGeometry
from store.run_format import ObjectRecord
from store.shard import encode_chunks


@dataclass(frozen=True, slots=True)
class Tap:
    """One site of one layer as this rank writes it. `head_shard` is its place on the head axis."""

    site: str
    layer_index: int
    head_shard: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank made durable of one attempt, or why it could not. `key` names the attempt."""

    key: int
    rank: int
    objects: tuple[ObjectRecord, ...] = ()
    chunk_sizes: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    """Site -> rows that the ledger proved, summed over layers."""
    error: str | None = None
    timings: dict[str, float] = field(default_factory=dict)


class _ShardBuffer:
    """A shard that is being filled from several steps, in the order of its chunks."""

    __slots__ = ("chunks_GCgtD", "missing", "seen")

    def __init__(self, cut: ArrayGeometry, shard: int, bits: np.dtype) -> None:
        chunks = cut.token_chunks_in_shard(shard)
        self.chunks_GCgtD = np.empty(
            (cut.groups_per_shard, chunks, cut.group_heads, cut.chunk_tokens, cut.head_size), bits
        )
        self.seen = np.zeros(cut.tokens_in_shard(shard), dtype=bool)
        self.missing = len(self.seen)

    def place(self, row: int, staged_GCgtD: np.ndarray, staged: int, count: int) -> None:
        """Copy `count` rows from staged row `staged` to the shard's rows from `row`."""
        copy_rows(self.chunks_GCgtD, row, staged_GCgtD, staged, count)
        self.missing -= int(np.count_nonzero(~self.seen[row : row + count]))
        self.seen[row : row + count] = True


def copy_rows(
    target_GCgtD: np.ndarray, row: int, source_GCgtD: np.ndarray, start: int, count: int
) -> None:
    """Copy `count` rows between arrays of tiles whose token counts and phases may differ."""
    target_tile, source_tile = target_GCgtD.shape[3], source_GCgtD.shape[3]
    while count:
        to, at = divmod(row, target_tile)
        from_, off = divmod(start, source_tile)
        size = min(count, target_tile - at, source_tile - off)
        target_GCgtD[:, to, :, at : at + size] = source_GCgtD[:, from_, :, off : off + size]
        row, start, count = row + size, start + size, count - size


class _Unit:
    """One attempt on this rank. Threads touch disjoint taps; shared fields are under `lock`."""

    def __init__(
        self, layout: UnitLayout, writer: AttemptWriter, cuts: dict[str, ArrayGeometry]
    ) -> None:
        self.layout, self.writer, self.cuts = layout, writer, cuts
        self.lock = threading.Lock()
        self.buffers: dict[tuple[int, int], _ShardBuffer] = {}
        self.left: dict[tuple[int, int], int] = {}
        self.objects: list[ObjectRecord] = []
        self.chunk_sizes: dict[str, np.ndarray] = {}
        self.rows: dict[str, int] = {}
        self.error: str | None = None
        self.sealed = 0
        self.timings = {"copy": 0.0, "encode": 0.0, "put": 0.0, "sync": 0.0}

    def fail(self, error: str) -> None:
        with self.lock:
            if self.error is None:
                self.error = error
            self.buffers.clear()

    def spent(self, stage: str, started: float) -> None:
        with self.lock:
            self.timings[stage] += time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class _Rows:
    slab: Slab
    entry: Entry


@dataclass(frozen=True, slots=True)
class _Seal:
    unit: _Unit


class Assembly:
    """The writer threads of one rank and the units that they are filling."""

    def __init__(
        self,
        rank: int,
        taps: Sequence[Tap],
        codec: Codec,
        num_threads: int,
        on_report: Callable[[RankReport], None],
    ) -> None:
        self.rank, self.taps, self.codec = rank, list(taps), codec
        self._on_report = on_report
        self._units: dict[int, _Unit] = {}
        self._lock = threading.Lock()
        self._broken: str | None = None
        threads = max(1, min(num_threads, len(self.taps) or 1))
        self._thread_of = _spread([tap.row_bytes for tap in self.taps], threads)
        self._queues: list[queue.SimpleQueue[_Rows | _Seal | None]] = [
            queue.SimpleQueue() for _ in range(threads)
        ]
        self._threads = [
            threading.Thread(
                target=self._work, args=(number,), name=f"shard-writer-{number}", daemon=True
            )
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise the first error that belongs to no unit."""
        if self._broken is not None:
            raise RuntimeError(f"a shard writer of rank {self.rank} broke:\n{self._broken}")

    def open_unit(
        self, layout: UnitLayout, writer: AttemptWriter, cuts: dict[str, ArrayGeometry]
    ) -> None:
        """Accept rows of an attempt from now on; `cuts` maps a site to its array's geometry."""
        with self._lock:
            self._units[layout.key] = _Unit(layout, writer, cuts)

    def layouts(self) -> dict[int, UnitLayout]:
        """Return the layouts of the open units by key."""
        with self._lock:
            return {key: unit.layout for key, unit in self._units.items()}

    def fail_unit(self, key: int, error: str) -> None:
        """Mark an attempt as failed; its sealing then reports `error`."""
        with self._lock:
            unit = self._units.get(key)
        if unit is not None:
            unit.fail(error)

    def drop_unit(self, key: int) -> None:
        """Forget an attempt; what it has written stays behind for gc, never committed."""
        with self._lock:
            unit = self._units.pop(key, None)
        if unit is not None:
            unit.fail("the attempt was dropped")

    def submit(self, slab: Slab) -> None:
        """Take over a filled slab; it is released once every entry is placed or written."""
        slab.pool.hold(slab, len(slab.entries))
        for entry in slab.entries:
            self._queues[self._thread_of[entry.tap]].put(_Rows(slab, entry))
        slab.release()

    def seal_unit(self, key: int) -> None:
        """Say that no more rows of the attempt will come; its report follows by `on_report`."""
        with self._lock:
            unit = self._units.get(key)
        if unit is None:
            self._on_report(RankReport(key, self.rank, error="the attempt is not open"))
            return
        for tasks in self._queues:
            tasks.put(_Seal(unit))

    def close(self, seconds: float = 10.0) -> None:
        """Stop the threads, after the work that is queued."""
        for tasks in self._queues:
            tasks.put(None)
        for thread in self._threads:
            thread.join(seconds)

    def _work(self, number: int) -> None:
        tasks = self._queues[number]
        while (task := tasks.get()) is not None:
            try:
                if isinstance(task, _Seal):
                    self._seal(task.unit, number)
                else:
                    self._place(task.slab, task.entry)
            except Exception:  # noqa: BLE001
                # Policy: an error outside any unit ends the engine at its next call (`check`).
                self._broken = self._broken or traceback.format_exc()
            finally:
                if isinstance(task, _Rows):
                    task.slab.release()

    def _place(self, slab: Slab, entry: Entry) -> None:
        slab.wait()
        staged_GCgtD = entry.bits(slab)
        for run in entry.runs:
            with self._lock:
                unit = self._units.get(run.unit)
            if unit is None or unit.error is not None:
                continue
            try:
                self._place_run(unit, entry, run, staged_GCgtD)
            except Exception:  # noqa: BLE001
                # Policy: whatever goes wrong with a unit's rows fails that unit, traceback and all.
                unit.fail(traceback.format_exc())

    def _place_run(self, unit: _Unit, entry: Entry, run: Run, staged_GCgtD: np.ndarray) -> None:
        cut = unit.cuts[self.taps[entry.tap].site]
        row, end, staged = run.row, run.row + run.num_rows, run.staged
        while row < end:
            shard = row // cut.shard_tokens
            first = shard * cut.shard_tokens
            count = min(end, first + cut.tokens_in_shard(shard)) - row
            self._place_rows(unit, entry.tap, shard, row - first, staged_GCgtD, staged, count)
            row, staged = row + count, staged + count

    def _place_rows(
        self,
        unit: _Unit,
        tap: int,
        shard: int,
        row: int,
        staged_GCgtD: np.ndarray,
        staged: int,
        count: int,
    ) -> None:
        cut, place = unit.cuts[self.taps[tap].site], (tap, shard)
        if place in unit.left:
            raise RowsMissing(
                f"unit {unit.layout.unit}: rows of {self.taps[tap]} were computed again after "
                "their shard had left; repeat the attempt with fewer prompts in flight"
            )
        buffer = unit.buffers.get(place)
        tile = staged_GCgtD.shape[3]
        whole = buffer is None and count == cut.tokens_in_shard(shard)
        if whole and tile == cut.chunk_tokens and staged % tile == 0:
            first = staged // tile
            chunks = cut.token_chunks_in_shard(shard)
            self._leave(unit, tap, shard, staged_GCgtD[:, first : first + chunks])
            return
        if buffer is None:
            buffer = unit.buffers[place] = _ShardBuffer(cut, shard, staged_GCgtD.dtype)
        started = time.perf_counter()
        buffer.place(row, staged_GCgtD, staged, count)
        unit.spent("copy", started)
        if buffer.missing == 0:
            unit.buffers.pop(place, None)
            self._leave(unit, tap, shard, buffer.chunks_GCgtD)

    def _leave(self, unit: _Unit, number: int, shard: int, chunks_GCgtD: np.ndarray) -> None:
        tap, rows = self.taps[number], unit.cuts[self.taps[number].site].tokens_in_shard(shard)
        started = time.perf_counter()
        encoded = encode_chunks(unit.cuts[tap.site], shard, chunks_GCgtD, self.codec)
        unit.spent("encode", started)
        started = time.perf_counter()
        record = unit.writer.put_shard(
            tap.site, (tap.layer_index, shard, tap.head_shard, 0), encoded
        )
        unit.spent("put", started)
        with unit.lock:
            unit.left[number, shard] = rows
            unit.objects.append(record)
            if self.codec is not Codec.RAW:
                unit.chunk_sizes[record.name] = encoded.chunk_sizes
            unit.rows[tap.site] = unit.rows.get(tap.site, 0) + rows

    def _seal(self, unit: _Unit, number: int) -> None:
        if unit.error is None:
            missing = self._first_missing(unit, number)
            if missing is not None:
                unit.fail(missing)
        with unit.lock:
            unit.sealed += 1
            last = unit.sealed == len(self._queues)
        if not last:
            return
        with self._lock:
            self._units.pop(unit.layout.key, None)
        if unit.error is None:
            started = time.perf_counter()
            try:
                unit.writer.sync()
            except Exception:  # noqa: BLE001
                # Policy: rows that may not be durable fail their unit.
                unit.fail(traceback.format_exc())
            unit.spent("sync", started)
        self._on_report(self._report(unit))

    def _report(self, unit: _Unit) -> RankReport:
        if unit.error is not None:
            return RankReport(unit.layout.key, self.rank, error=unit.error, timings=unit.timings)
        return RankReport(
            unit.layout.key,
            self.rank,
            objects=tuple(sorted(unit.objects, key=lambda record: record.name)),
            chunk_sizes=unit.chunk_sizes,
            rows=unit.rows,
            timings=unit.timings,
        )

    def _first_missing(self, unit: _Unit, number: int) -> str | None:
        for tap_number, tap in enumerate(self.taps):
            if self._thread_of[tap_number] != number:
                continue
            cut = unit.cuts[tap.site]
            for shard in range(cut.num_token_shards):
                if (tap_number, shard) in unit.left:
                    continue
                buffer = unit.buffers.get((tap_number, shard))
                first = 0 if buffer is None else int(np.argmin(buffer.seen))
                prompt, position = unit.layout.prompt_at(shard * cut.shard_tokens + first)
                return (
                    f"RowsMissing: unit {unit.layout.unit}, site {tap.site}, layer index "
                    f"{tap.layer_index}, rank {self.rank}: no row for position {position} of "
                    f"prompt {prompt} of the unit"
                )
        return None


def _spread(weights: Sequence[int], num_bins: int) -> list[int]:
    """Return a bin for each weight, heaviest first into the lightest bin."""
    bins, loads = [0] * len(weights), [0] * num_bins
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min(range(num_bins), key=loads.__getitem__)
        bins[item] = lightest
        loads[lightest] += weights[item]
    return bins
