"""Attention patterns made on the rank, of the rows of rot_q and rot_k that it captures.

A shard writer that owns both taps of a layer keeps a prompt's rows until all of them are there,
makes the pattern by `store.attention` (the reader's own arithmetic, float32) tile by tile of query
rows, and hands on packed entries: no square of a whole prompt is ever held. Heads are the rank's
own, so no rank needs another's keys. It knows neither shards nor stores, no torch and no engine.

Shape legend: N local heads, Q query rows of a tile, K keys, E entries, G head groups, C tiles of
tokens, g heads of a group, t tokens of a tile, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capture.errors import CaptureError, RowsMissing
from capture.rows import ALL_POSITIONS, Positions, UnitLayout
from capture.slabs import copy_rows
from store.attention import HeadRows, pattern
from store.codec import DTYPES
from store.packed_pattern import entry_starts, num_entries, pack_query_rows
from store.run_format import LayerSemantics, Site

TILE_BYTES = 8 << 20
"""Of a tile's probabilities, float32; one query row of all heads at the least."""


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


def make_pattern(
    semantics: LayerSemantics,
    q: HeadRows,
    k: HeadRows,
    dtype: str,
    tile_bytes: int = TILE_BYTES,
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Yield (first entry, packed [N, E] of `dtype`) of one prompt's pattern, rows in order.

    `q` and `k` hold every row of the prompt.
    """
    num_heads, num_rows = q.values.shape[:2]
    first = 0
    while first < num_rows:
        # The keys of a tile end with its last query: as many rows as fit if all saw that many.
        rows = max(1, tile_bytes // (4 * num_heads * (first + 1)))
        rows = max(1, tile_bytes // (4 * num_heads * min(num_rows, first + rows)))
        end = min(num_rows, first + rows)
        start = 0 if semantics.sliding_window is None else first - semantics.sliding_window + 1
        keys = slice(max(0, start), end)
        queries = HeadRows(q.values[:, first:end], q.heads, q.positions[first:end])
        given = HeadRows(k.values[:, keys], k.heads, k.positions[keys])
        tile_NQK = np.zeros((num_heads, end - first, end), np.float32)
        tile_NQK[:, :, keys] = pattern(semantics, queries, given)
        yield num_entries(first), pack_query_rows(tile_NQK, first, dtype)
        first = end


class _PromptRows:
    """The rows of one prompt that have come so far, [G, 1, g, rows, D] of each tap."""

    __slots__ = ("bits", "seen")

    def __init__(self, recipe: PatternRecipe, num_rows: int) -> None:
        self.bits: dict[int, np.ndarray[Any, Any]] = {}
        self.seen = {tap: np.zeros(num_rows, bool) for tap in (recipe.q_tap, recipe.k_tap)}


class PatternRows:
    """The prompts of one unit, in one layer, whose patterns are still to be made."""

    def __init__(self, recipe: PatternRecipe, layout: UnitLayout) -> None:
        self._recipe, self._layout = recipe, layout
        self._prompts: dict[int, _PromptRows] = {}
        self._made: set[int] = set()

    def place(
        self, tap: int, row: int, count: int, staged_GCgtD: np.ndarray[Any, Any], staged: int
    ) -> list[int]:
        """Keep rows of the unit from `row`; return the prompts of which all rows are there now."""
        whole: list[int] = []
        while count:
            prompt, at = self._layout.prompt_at(row)
            size = min(count, int(self._layout.num_rows[prompt]) - at)
            if prompt in self._made:
                raise RowsMissing(
                    f"unit {self._layout.unit}: rows of prompt {prompt} were computed again after "
                    "its pattern was made; repeat the attempt with fewer prompts in flight"
                )
            kept = self._prompts.get(prompt)
            if kept is None:
                rows = int(self._layout.num_rows[prompt])
                kept = self._prompts[prompt] = _PromptRows(self._recipe, rows)
            if tap not in kept.bits:
                groups, _, heads, _, head_size = staged_GCgtD.shape
                shape = (groups, 1, heads, len(kept.seen[tap]), head_size)
                kept.bits[tap] = np.empty(shape, staged_GCgtD.dtype)
            copy_rows(kept.bits[tap], at, staged_GCgtD, staged, size)
            kept.seen[tap][at : at + size] = True
            if all(seen.all() for seen in kept.seen.values()):
                whole.append(prompt)
            row, staged, count = row + size, staged + size, count - size
        return whole

    def take(self, prompt: int, num_rows: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Yield the packed tiles of a prompt's first `num_rows` rows, once; then forget them.

        Nothing comes of a prompt that lacks a row: the ledger of entries then says so.
        """
        kept = self._prompts.pop(prompt, None)
        if kept is None or not all(seen[:num_rows].all() for seen in kept.seen.values()):
            return
        self._made.add(prompt)
        recipe = self._recipe
        positions = np.arange(num_rows)
        q, k = (
            HeadRows(
                bits.reshape(-1, *bits.shape[3:])[:, :num_rows].view(DTYPES[recipe.row_dtype]),
                heads,
                positions,
            )
            for bits, heads in (
                (kept.bits[recipe.q_tap], recipe.q_heads),
                (kept.bits[recipe.k_tap], recipe.k_heads),
            )
        )
        yield from make_pattern(recipe.semantics, q, k, recipe.dtype)


def first_entries(layout: UnitLayout) -> np.ndarray[Any, Any]:
    """Return each prompt's first entry on the unit's entry axis, and the total at the end."""
    return entry_starts(layout.num_rows)


def bundles(taps: Mapping[int, PatternRecipe | None]) -> list[list[int]]:
    """Return the tap numbers that one writer must own together, a pattern's with what it is of."""
    made = {number: recipe for number, recipe in taps.items() if recipe is not None}
    together = [[recipe.q_tap, recipe.k_tap, number] for number, recipe in made.items()]
    bound = {number for bundle in together for number in bundle}
    return [*together, *([number] for number in taps if number not in bound)]
