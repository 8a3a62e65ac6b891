"""The rows of rot_q and rot_k that patterns are made of on the rank, kept until prompts are whole.

A shard writer that owns both taps of a layer keeps a prompt's rows until all of them are there;
then its pattern is made (`pattern_making`), with those of other prompts that became whole by the
same rows, and handed on as packed entries of the unit. Nothing waits for more prompts than that.
Heads are the rank's own, so no rank needs another's keys. It knows neither shards nor stores, no
torch and no engine.

Shape legend: N local heads, E entries, G head groups, C tiles of tokens, g heads of a group, t
tokens of a tile, T rows, D head size, B prompts of one length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from capture.errors import CaptureError, RowsMissing
from capture.pattern_making import (
    BATCH_BYTES,
    TILE_BYTES,
    batches,
    fits_one_tile,
    make_batch,
    make_pattern,
)
from capture.rows import ALL_POSITIONS, Positions, UnitLayout
from capture.slabs import copy_rows
from store.attention import HeadRows
from store.codec import DTYPES
from store.packed_pattern import entry_starts, num_entries
from store.run_format import LayerSemantics, Site


@dataclass(frozen=True, slots=True)
class PatternRecipe:
    """What the pattern of one layer is made of: two taps, and the layer as this rank computes it.

    Heads are numbered as the rank has them, in `semantics` too; `q_heads` and `k_heads` are those
    in the taps. `row_dtype` is that of the taps, `dtype` is stored.
    """

    q_tap: int
    k_tap: int
    q_heads: tuple[int, ...]
    k_heads: tuple[int, ...]
    semantics: LayerSemantics
    row_dtype: str
    dtype: str


def require_rows(dtype: str | None, sites: Sequence[Site], positions: Positions) -> None:
    """Raise `CaptureError` where patterns are to be stored of rows that are not all captured."""
    if dtype is None:
        return
    missing = [site.value for site in (Site.ROT_Q, Site.ROT_K) if site not in sites]
    if missing:
        raise CaptureError(
            f"stored patterns are made of rot_q and rot_k: add {', '.join(missing)} to the sites"
        )
    if positions != ALL_POSITIONS:
        raise CaptureError("stored patterns need the rows of every position: keep all positions")


class _Kept:
    """The rows that have come so far of prompts that lie back to back, [G, 1, g, T, D] a tap."""

    __slots__ = ("bits", "first", "seen")

    def __init__(self, recipe: PatternRecipe, first: int, num_rows: int) -> None:
        self.first = first
        """Row of the unit."""
        self.bits: dict[int, np.ndarray[Any, Any]] = {}
        self.seen = {tap: np.zeros(num_rows, bool) for tap in (recipe.q_tap, recipe.k_tap)}

    def place(
        self, tap: int, at: int, staged_GCgtD: np.ndarray[Any, Any], staged: int, count: int
    ) -> None:
        if tap not in self.bits:
            groups, _, heads, _, head_size = staged_GCgtD.shape
            shape = (groups, 1, heads, len(self.seen[tap]), head_size)
            self.bits[tap] = np.empty(shape, staged_GCgtD.dtype)
        copy_rows(self.bits[tap], at, staged_GCgtD, staged, count)
        self.seen[tap][at : at + count] = True

    def whole(self, row: int, end: int) -> bool:
        """Return whether all unit rows from `row` to `end` are there, of both taps."""
        at, stop = row - self.first, end - self.first
        return all(bool(seen[at:stop].all()) for seen in self.seen.values())

    def rows(self, tap: int, row: int, num_rows: int) -> np.ndarray[Any, Any]:
        """Return a prompt's rows of a tap, bits [heads, T, D], not copied."""
        bits, at = self.bits[tap], row - self.first
        return bits.reshape(-1, *bits.shape[3:])[:, at : at + num_rows]


@dataclass(frozen=True, slots=True)
class _Whole:
    """A prompt of which every row is there: its first row of the unit, its entries of the unit."""

    prompt: int
    row: int
    num_rows: int
    entry: int

    @property
    def end(self) -> int:
        """The entry after its last."""
        return self.entry + num_entries(self.num_rows)


class PatternRows:
    """The prompts of one unit, in one layer, whose patterns are still to be made."""

    def __init__(
        self,
        recipe: PatternRecipe,
        layout: UnitLayout,
        tile_bytes: int = TILE_BYTES,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._recipe, self._layout = recipe, layout
        self._tile_bytes, self._batch_bytes = tile_bytes, min(batch_bytes, tile_bytes)
        self._running = np.flatnonzero(layout.num_rows)
        self._ends = layout.first_row[self._running] + layout.num_rows[self._running]
        self._kept: dict[int, _Kept] = {}
        self._made: set[int] = set()

    def place(
        self, tap: int, row: int, count: int, staged_GCgtD: np.ndarray[Any, Any], staged: int
    ) -> list[int]:
        """Keep rows of the unit from `row`; return the prompts of which all rows are there now."""
        if not count:
            return []
        end = row + count
        first = int(np.searchsorted(self._ends, row, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        prompts: list[int] = self._running[first : last + 1].tolist()
        self._refuse_made(prompts)
        self._begin(prompts, row, end)
        at = row
        for kept, together in groupby(prompts, self._kept.__getitem__):
            *_, final = together
            stop = min(end, self._rows_of(final)[1])
            kept.place(tap, at - kept.first, staged_GCgtD, staged + at - row, stop - at)
            at = stop
        return [prompt for prompt in prompts if self._kept[prompt].whole(*self._rows_of(prompt))]

    def _rows_of(self, prompt: int) -> tuple[int, int]:
        """Return the unit rows of a prompt: the first, and the one after the last."""
        first = int(self._layout.first_row[prompt])
        return first, first + int(self._layout.num_rows[prompt])

    def _refuse_made(self, prompts: Sequence[int]) -> None:
        for prompt in prompts:
            if prompt in self._made:
                raise RowsMissing(
                    f"unit {self._layout.unit}: rows of prompt {prompt} were computed again after "
                    "its pattern was made; repeat the attempt with fewer prompts in flight"
                )

    def _begin(self, prompts: Sequence[int], row: int, end: int) -> None:
        """Make room for those of which nothing has come: one array for all that come whole."""
        fresh: list[list[int]] = [[]]
        for prompt in prompts:
            first, stop = self._rows_of(prompt)
            if prompt in self._kept:
                fresh.append([])
            elif row <= first and stop <= end:
                fresh[-1].append(prompt)
            else:
                fresh += [[prompt], []]
        for together in filter(None, fresh):
            first, stop = self._rows_of(together[0])[0], self._rows_of(together[-1])[1]
            kept = _Kept(self._recipe, first, stop - first)
            self._kept |= dict.fromkeys(together, kept)

    def take(
        self, prompts: Sequence[int], layout: UnitLayout
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Yield (first entry of the unit, packed [N, E]) of prompts, once; then forget their rows.

        `layout` says how many of each prompt's first rows count. Nothing comes of a prompt that
        lacks one of them: the ledger of entries then says so.
        """
        for together in self._together(self._ready(prompts, layout)):
            self._made |= {one.prompt for one in together}
            if fits_one_tile(len(self._recipe.q_heads), together[0].num_rows, self._tile_bytes):
                yield together[0].entry, self._packed(together)
            else:
                yield from self._in_tiles(together[0])
            for one in together:
                del self._kept[one.prompt]

    def _ready(self, prompts: Sequence[int], layout: UnitLayout) -> Iterator[_Whole]:
        starts = first_entries(layout)
        for prompt in sorted(prompts):
            first, num_rows = self._rows_of(prompt)[0], int(layout.num_rows[prompt])
            kept = self._kept.get(prompt)
            if kept is not None and num_rows and kept.whole(first, first + num_rows):
                yield _Whole(prompt, first, num_rows, int(starts[prompt]))

    def _together(self, ready: Iterable[_Whole]) -> Iterator[list[_Whole]]:
        """Yield prompts whose entries follow each other, within a tile's bytes, or a long one."""
        num_heads = len(self._recipe.q_heads)
        found: list[_Whole] = []
        for one in ready:
            if found and not (
                one.entry == found[-1].end
                and 4 * num_heads * (one.end - found[0].entry) <= self._tile_bytes
                and fits_one_tile(num_heads, found[-1].num_rows, self._tile_bytes)
                and fits_one_tile(num_heads, one.num_rows, self._tile_bytes)
            ):
                yield found
                found = []
            found.append(one)
        if found:
            yield found

    def _packed(self, together: Sequence[_Whole]) -> np.ndarray[Any, Any]:
        """Return the packed [N, E] of prompts whose entries follow each other."""
        recipe, start = self._recipe, together[0].entry
        num_heads = len(recipe.q_heads)
        packed_NE = np.empty((num_heads, together[-1].end - start), DTYPES[recipe.dtype])
        lengths = [one.num_rows for one in together]
        head_size = recipe.semantics.head_size
        for places in batches(lengths, num_heads, head_size, self._batch_bytes):
            batch = [together[place] for place in places]
            made_BNE = make_batch(
                recipe.semantics,
                self._head_rows(recipe.q_tap, recipe.q_heads, batch),
                self._head_rows(recipe.k_tap, recipe.k_heads, batch),
                recipe.dtype,
            )
            for one, made_NE in zip(batch, made_BNE, strict=True):
                packed_NE[:, one.entry - start : one.end - start] = made_NE
        return packed_NE

    def _in_tiles(self, one: _Whole) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        recipe = self._recipe
        q, k = (
            HeadRows(
                self._kept[one.prompt].rows(tap, one.row, one.num_rows).view(self._row_dtype),
                heads,
                np.arange(one.num_rows),
            )
            for tap, heads in ((recipe.q_tap, recipe.q_heads), (recipe.k_tap, recipe.k_heads))
        )
        tiles = make_pattern(recipe.semantics, q, k, recipe.dtype, self._tile_bytes)
        for entry, packed_NE in tiles:
            yield one.entry + entry, packed_NE

    def _head_rows(self, tap: int, heads: tuple[int, ...], batch: Sequence[_Whole]) -> HeadRows:
        """Return the rows of prompts of one length, [B, heads, T, D]."""
        rows = [self._kept[one.prompt].rows(tap, one.row, one.num_rows) for one in batch]
        bits_BHTD = np.stack(rows)
        return HeadRows(bits_BHTD.view(self._row_dtype), heads, np.arange(batch[0].num_rows))

    @property
    def _row_dtype(self) -> np.dtype[Any]:
        return DTYPES[self._recipe.row_dtype]


def first_entries(layout: UnitLayout) -> np.ndarray[Any, Any]:
    """Return each prompt's first entry on the unit's entry axis, and the total at the end."""
    return entry_starts(layout.num_rows)


def bundles(taps: Mapping[int, PatternRecipe | None]) -> list[list[int]]:
    """Return the tap numbers that one writer must own together, a pattern's with what it is of."""
    made = {number: recipe for number, recipe in taps.items() if recipe is not None}
    together = [[recipe.q_tap, recipe.k_tap, number] for number, recipe in made.items()]
    bound = {number for bundle in together for number in bundle}
    return [*together, *([number] for number in taps if number not in bound)]
