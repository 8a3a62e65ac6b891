"""The work of one shard writer: staged rows become durable shards, and a ledger misses none.

A writer owns some taps (one tap is one site of one layer), so all rows of a tap meet here in order
and a row computed twice (preemption) is replaced by its later self. Rows that fill a shard by
themselves are encoded as they lie in the slab; others meet in a shard buffer, whose `seen` marks
are the ledger. A shard leaves once every row is there. Sealing a unit asks whether all of its
shards left; if not, the part fails and names the first row missing.

It runs in a thread or in a process of its own, and knows neither: it takes messages and returns
parts of reports. It knows no torch and no engine.

Shape legend: G head groups, C chunks (or tiles) of tokens, g heads of a group, t tokens of a chunk,
D head size.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from capture.errors import RowsMissing
from capture.pattern_rows import PatternRecipe, PatternRows, first_entries
from capture.rows import Run, UnitLayout
from capture.slabs import BITS_DTYPE, Entry, copy_rows
from store.attempt import AttemptWriter
from store.codec import Codec
from store.errors import is_store_trouble
from store.geometry import ArrayGeometry
from store.objects.protocol import ObjectStore
from store.run_format import ObjectRecord
from store.shard import encode_chunks


@dataclass(frozen=True, slots=True)
class Tap:
    """One site of one layer as this rank has it. `head_shard` is its place on the head axis."""

    site: str
    layer_index: int
    head_shard: int
    row_bytes: int
    writes: bool = True
    """Whether it is stored; else patterns are made of it, and another rank stores it."""
    recipe: PatternRecipe | None = None
    """Of a pattern, which is not staged but made of two other taps; its rows are entries."""

    def coordinates(self, shard: int) -> tuple[int, ...]:
        """Return where a shard of it lies in the grid of its array."""
        if self.recipe is not None:
            return (self.layer_index, self.head_shard, shard)
        return (self.layer_index, shard, self.head_shard, 0)


@dataclass(frozen=True, slots=True)
class OpenUnit:
    """Accept rows of an attempt from now on; `cuts` maps a site to its array's geometry.

    `held`: how many rows each prompt gets is known only at the end (generation); `layout` then
    reserves the most, and shards are cut and written when the unit is sealed.
    """

    layout: UnitLayout
    cuts: dict[str, ArrayGeometry]
    held: bool = False


@dataclass(frozen=True, slots=True)
class FailUnit:
    """Drop the attempt's rows from now on; its sealing reports `error`."""

    key: int
    error: str


@dataclass(frozen=True, slots=True)
class SealUnit:
    """No more rows of the attempt will come: report. `final` replaces the reserved layout."""

    key: int
    final: OpenUnit | None = None


@dataclass(frozen=True, slots=True)
class AskUnit:
    """Tell whether the attempt has failed by the rows that came so far."""

    key: int


Message = OpenUnit | FailUnit | SealUnit | AskUnit


@dataclass(frozen=True, slots=True)
class PartState:
    """One writer's answer to `AskUnit`: the attempt's error, if it has one."""

    key: int
    error: str | None


@dataclass(frozen=True, slots=True)
class PartReport:
    """What one writer made durable of one attempt, or why it could not."""

    key: int
    objects: tuple[ObjectRecord, ...] = ()
    chunk_sizes: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    """Site -> rows that the ledger proved, summed over layers."""
    error: str | None = None
    store_failed: bool = False
    """Whether it was the store that failed, not the unit."""
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

    def take(self, row: int, source: _ShardBuffer, start: int, count: int) -> None:
        """Copy `count` rows from row `start` of another buffer, those that it has seen."""
        copy_rows(self.chunks_GCgtD, row, source.chunks_GCgtD, start, count)
        seen = source.seen[start : start + count]
        self.missing -= int(np.count_nonzero(seen & ~self.seen[row : row + count]))
        self.seen[row : row + count] |= seen


class _Moved:
    """Where the rows of a unit's final layout lie in its reserved one."""

    def __init__(self, reserved: UnitLayout, final: UnitLayout) -> None:
        self._reserved, self._final = reserved, final
        if np.any(final.num_rows > reserved.num_rows):
            raise RowsMissing(f"unit {final.unit}: a prompt got more rows than were reserved")

    def pieces(self, first: int, size: int, shard_tokens: int) -> Iterator[tuple[int, int, int]]:
        """Yield (final row, reserved row, count) that make up `size` final rows from `first`.

        No piece crosses a shard boundary of the reserved rows.
        """
        row = first
        while row < first + size:
            prompt, position = self._final.prompt_at(row)
            source = int(self._reserved.first_row[prompt]) + position
            count = min(
                first + size - row,
                int(self._final.num_rows[prompt]) - position,
                shard_tokens - source % shard_tokens,
            )
            yield row, source, count
            row += count


class _Unit:
    """This writer's part of one attempt."""

    def __init__(self, message: OpenUnit, store: ObjectStore) -> None:
        self.layout, self.cuts, self.held = message.layout, message.cuts, message.held
        self.writer = AttemptWriter(store, message.layout.unit, message.layout.attempt)
        self.buffers: dict[tuple[int, int], _ShardBuffer] = {}
        self.patterns: dict[int, PatternRows] = {}
        self.left: set[tuple[int, int]] = set()
        self.objects: list[ObjectRecord] = []
        self.chunk_sizes: dict[str, np.ndarray] = {}
        self.rows: dict[str, int] = {}
        self.error: str | None = None
        self.store_failed = False
        self.timings = {"copy": 0.0, "encode": 0.0, "put": 0.0}

    def fail(self, error: str, raised: Exception | None = None) -> None:
        """Keep the first error; `raised` is set where placing or writing rows raised it."""
        if self.error is None:
            self.error = error
            self.store_failed = raised is not None and is_store_trouble(raised)
        self.buffers.clear()
        self.patterns.clear()

    def spent(self, stage: str, started: float) -> None:
        self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - started


class ShardLoop:
    """One writer's units and its taps, by the rank's tap numbers."""

    def __init__(self, rank: int, taps: dict[int, Tap], codec: Codec, store: ObjectStore) -> None:
        self.rank, self.taps, self.codec, self.store = rank, taps, codec, store
        self._units: dict[int, _Unit] = {}
        self._feeds: dict[int, int] = {}
        """Tap that a pattern is made of -> the tap of that pattern."""
        for number, tap in taps.items():
            if tap.recipe is not None:
                self._feeds |= {tap.recipe.q_tap: number, tap.recipe.k_tap: number}

    def handle(self, message: Message) -> PartReport | PartState | None:
        """Obey a message; a seal returns this writer's part of the report, a question its state."""
        match message:
            case OpenUnit():
                self._units[message.layout.key] = _Unit(message, self.store)
            case FailUnit(key, error):
                if (unit := self._units.get(key)) is not None:
                    unit.fail(error)
            case SealUnit(key, final):
                return self._seal(key, final)
            case AskUnit(key):
                asked = self._units.get(key)
                return PartState(key, None if asked is None else asked.error)
        return None

    def place(self, entries: Sequence[Entry], slab: np.ndarray) -> None:
        """Take the rows of entries that lie in `slab`, uint8 [slab bytes], before it is reused."""
        for entry in entries:
            staged_GCgtD = entry.bits(slab)
            for run in entry.runs:
                unit = self._units.get(run.unit)
                if unit is None or unit.error is not None:
                    continue
                try:
                    if entry.tap in self._feeds:
                        self._feed(unit, entry.tap, run, staged_GCgtD)
                    if self.taps[entry.tap].writes:
                        self._place_run(unit, entry.tap, run, staged_GCgtD)
                except Exception as error:  # noqa: BLE001
                    # Policy: whatever goes wrong with a unit's rows fails that unit, with why.
                    unit.fail(traceback.format_exc(), error)

    def _feed(self, unit: _Unit, tap: int, run: Run, staged_GCgtD: np.ndarray) -> None:
        """Keep rows that a pattern is made of; make the patterns of prompts that are whole."""
        number = self._feeds[tap]
        recipe = self.taps[number].recipe
        assert recipe is not None
        started = time.perf_counter()
        rows = unit.patterns.setdefault(number, PatternRows(recipe, unit.layout))
        whole = rows.place(tap, run.row, run.num_rows, staged_GCgtD, run.staged)
        unit.spent("copy", started)
        if not unit.held:
            self._make_patterns(unit, number, whole)

    def _make_patterns(self, unit: _Unit, number: int, prompts: Sequence[int]) -> None:
        started = time.perf_counter()
        for entry, packed_NE in unit.patterns[number].take(prompts, unit.layout):
            unit.spent("pattern", started)
            run = Run(unit.layout.key, entry, packed_NE.shape[1], 0)
            bits_NE = packed_NE.view(BITS_DTYPE[packed_NE.itemsize])
            self._place_run(unit, number, run, bits_NE[:, None, None, :, None])
            started = time.perf_counter()
        unit.spent("pattern", started)

    def _place_run(self, unit: _Unit, tap: int, run: Run, staged_GCgtD: np.ndarray) -> None:
        cut = unit.cuts[self.taps[tap].site]
        row, end, staged = run.row, run.row + run.num_rows, run.staged
        while row < end:
            shard = row // cut.shard_tokens
            first = shard * cut.shard_tokens
            count = min(end, first + cut.tokens_in_shard(shard)) - row
            self._place_rows(unit, tap, shard, row - first, staged_GCgtD, staged, count)
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
        whole = buffer is None and count == cut.tokens_in_shard(shard) and not unit.held
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
        if buffer.missing == 0 and not unit.held:
            del unit.buffers[place]
            self._leave(unit, tap, shard, buffer.chunks_GCgtD)

    def _settle(self, unit: _Unit, final: OpenUnit) -> None:
        """Move a held unit's rows from where they were reserved to where they belong, and write.

        Rows past a prompt's end (of a step that ran on) are left behind.
        """
        old_cuts, buffers = unit.cuts, unit.buffers
        rows_of = _Moved(unit.layout, final.layout)
        unit.layout, unit.cuts, unit.held, unit.buffers = final.layout, final.cuts, False, {}
        for number, tap in sorted(self.taps.items()):
            if tap.recipe is not None or not tap.writes:
                continue
            old, new = old_cuts[tap.site], final.cuts[tap.site]
            for shard in range(new.num_token_shards):
                first, size = shard * new.shard_tokens, new.tokens_in_shard(shard)
                target: _ShardBuffer | None = None
                for row, source_row, count in rows_of.pieces(first, size, old.shard_tokens):
                    source = buffers.get((number, source_row // old.shard_tokens))
                    if source is not None:
                        bits = source.chunks_GCgtD.dtype
                        target = target or _ShardBuffer(new, shard, bits)
                        target.take(row - first, source, source_row % old.shard_tokens, count)
                if target is not None and target.missing == 0:
                    self._leave(unit, number, shard, target.chunks_GCgtD)
                elif target is not None:
                    unit.buffers[number, shard] = target
            for place in [place for place in buffers if place[0] == number]:
                del buffers[place]
        for number in unit.patterns:
            self._make_patterns(unit, number, np.flatnonzero(final.layout.num_rows).tolist())

    def _leave(self, unit: _Unit, number: int, shard: int, chunks_GCgtD: np.ndarray) -> None:
        tap = self.taps[number]
        cut = unit.cuts[tap.site]
        started = time.perf_counter()
        key = unit.writer.shard_key(tap.site, tap.coordinates(shard))
        encoded = encode_chunks(cut, shard, chunks_GCgtD, self.codec, key)
        unit.spent("encode", started)
        started = time.perf_counter()
        record = unit.writer.put_shard(encoded)
        unit.spent("put", started)
        unit.left.add((number, shard))
        unit.objects.append(record)
        if self.codec is not Codec.RAW:
            unit.chunk_sizes[record.name] = encoded.chunk_sizes
        unit.rows[tap.site] = unit.rows.get(tap.site, 0) + cut.tokens_in_shard(shard)

    def _seal(self, key: int, final: OpenUnit | None) -> PartReport:
        unit = self._units.pop(key, None)
        if unit is None:
            return PartReport(key, error="the attempt is not open")
        if final is not None and unit.error is None:
            try:
                self._settle(unit, final)
            except Exception as raised:  # noqa: BLE001
                # Policy: whatever goes wrong with a unit's rows fails that unit, with why.
                unit.fail(traceback.format_exc(), raised)
        error = unit.error or self._first_missing(unit)
        if error is not None:
            return PartReport(
                key, error=error, store_failed=unit.store_failed, timings=unit.timings
            )
        return PartReport(
            key,
            objects=tuple(unit.objects),
            chunk_sizes=unit.chunk_sizes,
            rows=unit.rows,
            timings=unit.timings,
        )

    def _first_missing(self, unit: _Unit) -> str | None:
        for number, tap in sorted(self.taps.items()):
            if not tap.writes:
                continue
            cut = unit.cuts[tap.site]
            for shard in range(cut.num_token_shards):
                if (number, shard) in unit.left:
                    continue
                buffer = unit.buffers.get((number, shard))
                first = 0 if buffer is None else int(np.argmin(buffer.seen))
                row = shard * cut.shard_tokens + first
                if tap.recipe is None:
                    prompt, position = unit.layout.prompt_at(row)
                    lacking = f"no row for position {position}"
                else:
                    starts = first_entries(unit.layout)
                    prompt = int(np.searchsorted(starts, row, side="right")) - 1
                    lacking = "no entry"
                return (
                    f"RowsMissing: unit {unit.layout.unit}, site {tap.site}, layer index "
                    f"{tap.layer_index}, rank {self.rank}: {lacking} of prompt {prompt} of the unit"
                )
        return None
