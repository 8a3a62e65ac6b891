"""From filled slabs to a rank's reports: which writer gets what, and what the writers answer.

Taps are spread over the writers by their bytes, each tap to one writer; with more writers than taps
there are several such groups, and units go to the groups in turn. One thread hands slabs and
messages on in order, once a slab's copy is done; a slab returns to its pool when every writer took
its rows. The writers' parts of a unit make one report. What a writer does is in `shard_loop`, how
it is reached in `lanes`.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from capture.errors import CaptureStalled
from capture.lanes import Answer, Broken, Lane, OnAnswer, Rows, SlabDone
from capture.pattern_rows import bundles
from capture.rows import UnitLayout
from capture.shard_loop import (
    AskUnit,
    FailUnit,
    Message,
    OpenUnit,
    PartReport,
    PartState,
    SealUnit,
    Tap,
)
from capture.slabs import Entry, Slab, SlabPool
from store.run_format import ObjectRecord


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
    store_failed: bool = False
    """Whether it was the store that failed, not the unit."""
    timings: dict[str, float] = field(default_factory=dict)


class Assembly:
    """The writers of one rank and the units that they are filling."""

    def __init__(
        self,
        rank: int,
        taps: Sequence[Tap],
        num_writers: int,
        pool: SlabPool,
        start_lanes: Callable[[list[dict[int, Tap]], OnAnswer], list[Lane]],
        on_report: Callable[[RankReport], None],
    ) -> None:
        self.rank, self._pool, self._on_report = rank, pool, on_report
        together = bundles({number: tap.recipe for number, tap in enumerate(taps)})
        self._group_size = max(1, min(num_writers, len(together)))
        self._num_groups = max(1, num_writers // self._group_size)
        self._writer_of = [0] * len(taps)
        weights = [sum(taps[number].row_bytes for number in bundle) for bundle in together]
        for bundle, writer in zip(together, spread(weights, self._group_size), strict=True):
            for number in bundle:
                self._writer_of[number] = writer
        shares: list[dict[int, Tap]] = [{} for _ in range(self._group_size)]
        for number, tap in enumerate(taps):
            shares[self._writer_of[number]][number] = tap
        self._layouts: dict[int, UnitLayout] = {}
        self._parts: dict[int, list[PartReport]] = {}
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._todo: queue.SimpleQueue[Slab | Message | None] = queue.SimpleQueue()
        self._states: queue.SimpleQueue[PartState] = queue.SimpleQueue()
        self._lanes = start_lanes(shares * self._num_groups, self._answered)
        self._dispatcher = threading.Thread(target=self._work, name="slab-dispatcher", daemon=True)
        self._dispatcher.start()

    def check(self) -> None:
        """Raise the first error that belongs to no unit."""
        if self._broken is not None:
            raise RuntimeError(f"a shard writer of rank {self.rank} broke:\n{self._broken}")

    def open_unit(self, unit: OpenUnit) -> None:
        """Accept rows of an attempt from now on."""
        with self._lock:
            self._layouts[unit.layout.key] = unit.layout
        self._todo.put(unit)

    def layouts(self) -> dict[int, UnitLayout]:
        """Return the layouts of the open units by key."""
        with self._lock:
            return dict(self._layouts)

    def fail_unit(self, key: int, error: str) -> None:
        """Mark an attempt as failed; its sealing then reports `error`.

        What it has written stays behind for gc, never committed.
        """
        self._todo.put(FailUnit(key, error))

    def unit_error(self, key: int, seconds: float = 600.0) -> str | None:
        """Return why the attempt has failed by all rows that were submitted; None if it has not.

        Waits until the writers have taken them, so it is for units that run a few prompts at a
        time. Raises the first error that belongs to no unit.
        """
        self._todo.put(AskUnit(key))
        deadline = time.monotonic() + seconds
        states: list[PartState] = []
        while len(states) < self._group_size:
            self.check()
            with suppress(queue.Empty):
                state = self._states.get(timeout=0.05)
                states += [state] if state.key == key else []
            if time.monotonic() > deadline:
                raise CaptureStalled(
                    f"the writers of rank {self.rank} did not take a batch's rows within "
                    f"{seconds:.0f} s"
                )
        return next((state.error for state in states if state.error is not None), None)

    def submit(self, slab: Slab) -> None:
        """Take over a filled slab; it is released once every entry is placed or written."""
        self._todo.put(slab)

    def seal_unit(self, key: int, final: OpenUnit | None = None) -> None:
        """Say that no more rows of the attempt will come; its report follows by `on_report`.

        `final` gives a held unit the rows that its prompts really got.
        """
        with self._lock:
            self._layouts.pop(key, None)
        self._todo.put(SealUnit(key, final))

    def close(self, seconds: float = 10.0) -> None:
        """Stop the writers, after the work that is queued."""
        self._todo.put(None)
        self._dispatcher.join(seconds)
        for lane in self._lanes:
            lane.close(seconds)

    def _work(self) -> None:
        while (task := self._todo.get()) is not None:
            try:
                if isinstance(task, Slab):
                    self._hand_on(task)
                else:
                    key = task.layout.key if isinstance(task, OpenUnit) else task.key
                    for lane in self._group(key):
                        lane.send(task)
            except Exception:  # noqa: BLE001
                # Policy: an error outside any unit ends the engine at its next call (`check`).
                self._break(traceback.format_exc())

    def _hand_on(self, slab: Slab) -> None:
        slab.wait()
        shares: dict[int, list[Entry]] = {}
        for entry in slab.entries:
            groups = {run.unit % self._num_groups for run in entry.runs}
            for group in groups:
                lane = group * self._group_size + self._writer_of[entry.tap]
                shares.setdefault(lane, []).append(entry)
        self._pool.hold(slab, len(shares))
        for number, entries in shares.items():
            self._lanes[number].send(Rows(slab.number, tuple(entries)))
        slab.release()

    def _group(self, key: int) -> list[Lane]:
        first = key % self._num_groups * self._group_size
        return self._lanes[first : first + self._group_size]

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, SlabDone):
            self._pool.release_number(answer.slab)
        elif isinstance(answer, Broken):
            self._break(answer.error)
        elif isinstance(answer, PartState):
            self._states.put(answer)
        else:
            with self._lock:
                parts = self._parts.setdefault(answer.key, [])
                parts.append(answer)
                if len(parts) < self._group_size:
                    return
                del self._parts[answer.key]
            self._on_report(self._merged(answer.key, parts))

    def _break(self, error: str) -> None:
        self._broken = self._broken or error
        self._pool.give_up(self._broken)

    def _merged(self, key: int, parts: Sequence[PartReport]) -> RankReport:
        timings: dict[str, float] = {}
        rows: dict[str, int] = {}
        for part in parts:
            for stage, seconds in part.timings.items():
                timings[stage] = timings.get(stage, 0.0) + seconds
            for site, count in part.rows.items():
                rows[site] = rows.get(site, 0) + count
        failed = first_failed(parts)
        if failed is not None:
            return RankReport(
                key,
                self.rank,
                error=failed.error,
                store_failed=failed.store_failed,
                timings=timings,
            )
        objects = [record for part in parts for record in part.objects]
        return RankReport(
            key,
            self.rank,
            objects=tuple(sorted(objects, key=lambda record: record.name)),
            chunk_sizes={name: s for part in parts for name, s in part.chunk_sizes.items()},
            rows=rows,
            timings=timings,
        )


Report = TypeVar("Report", PartReport, RankReport)


def first_failed(reports: Sequence[Report]) -> Report | None:
    """Return the report whose error is told: the first, the unit's own before the store's."""
    failed = [report for report in reports if report.error is not None]
    return min(failed, key=lambda report: report.store_failed, default=None)


def spread(weights: Sequence[int], num_bins: int) -> list[int]:
    """Return a bin for each weight, heaviest first into the lightest bin."""
    bins, loads = [0] * len(weights), [0] * num_bins
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min(range(num_bins), key=loads.__getitem__)
        bins[item] = lightest
        loads[lightest] += weights[item]
    return bins
