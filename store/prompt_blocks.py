"""Many stored prompts as blocks: runs of neighbouring rows of one unit that are read together.

Knows the index and unit arrays; never knows what the rows are for. Short prompts share chunks, so
reading prompt by prompt would read a chunk once for each of them; a block reads it once. Batches
and reductions stream blocks, so their memory is a block's, not the run's.

Legend: L layers, H heads, R rows of a block (its prompts back to back), D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store.codec import DTYPES
from store.errors import DamagedObject
from store.explain import ReadCost
from store.run_format import Outcome
from store.run_index import PENDING, Prompt, RunIndex, UnitSummary
from store.selection import AxisSelection, Choice, select
from store.unit_arrays import PromptArray, UnitArrays

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The wanted rows of one prompt: `places` count from its first row on the unit's token axis."""

    row: int
    place: int
    places: Indices
    positions: Indices


@dataclass(frozen=True, slots=True)
class Block:
    """Prompts of one unit, near each other on its token axis."""

    unit: int
    prompts: tuple[PromptRows, ...]

    @property
    def num_rows(self) -> int:
        return sum(len(prompt.places) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which of the prompts asked for are stored, and how many are not, by state."""

    blocks: tuple[Block, ...]
    missing: dict[str, int]


def choose(
    index: RunIndex,
    prompts: Iterable[Prompt] | None,
    *,
    pos: Choice = None,
    block_rows: int = 1024,
) -> Chosen:
    """Cut the wanted prompts into blocks of about `block_rows` rows, in plan order.

    None means every stored prompt, and `missing` counts the others. Prompts that are named must be
    stored: `PromptNotFound`, `PromptNotStored`. `pos` picks positions of each prompt (a slice may
    reach past a prompt's end; an int may not).
    """
    missing: dict[str, int] = {}
    if prompts is None:
        summaries = index.summaries(index.committed)
        wanted = {unit: _stored_places(summary) for unit, summary in summaries.items()}
        for summary in summaries.values():
            for outcome in summary.outcomes:
                if outcome is not Outcome.STORED:
                    missing[str(outcome)] = missing.get(str(outcome), 0) + 1
        covered = sum(len(summary.outcomes) for summary in summaries.values())
        if index.num_prompts > covered:
            missing[PENDING] = index.num_prompts - covered
    else:
        rows = index.rows_of(list(prompts))
        summaries = index.summaries(np.unique(index.units_of(rows)).tolist())
        wanted = _named_places(index, rows, summaries)
    blocks: list[Block] = []
    for unit, places in sorted(wanted.items()):
        blocks += _cut(summaries[unit], places, pos, block_rows)
    return Chosen(tuple(blocks), missing)


class BlockReader:
    """Reads one site of blocks: the same layers and heads of every prompt."""

    def __init__(
        self, index: RunIndex, arrays: UnitArrays, site: str, layers: Choice, heads: Choice
    ) -> None:
        self._index = index
        self._arrays = arrays
        self.site = site
        self._layers = layers
        self._heads = heads

    def axes(self, block: Block) -> tuple[AxisSelection, AxisSelection]:
        """Return the layers and heads picked from the block's unit."""
        array = self._array(block)
        return self._axes(array)

    def row_bytes(self, block: Block) -> int:
        """Return the bytes of one row of the picked layers and heads."""
        array = self._array(block)
        layers, heads = self._axes(array)
        record = array.layout.record
        return len(layers) * len(heads) * record.head_size * record.item_bytes

    def read(self, block: Block, *, layers: Indices | None = None) -> NDArray[Any]:
        """Return [L, H, R, D] of the block; `layers` (places in the pick) reads only some."""
        array = self._array(block)
        picked, heads = self._axes(array)
        wanted = picked.indices if layers is None else picked.indices[layers]
        shape = (len(wanted), len(heads), block.num_rows, array.layout.record.head_size)
        out_LHRD = np.empty(shape, DTYPES[array.layout.record.dtype])
        rows = self.rows(block)
        array.reader.read_into(array.prefix, array.layout, wanted, heads.indices, rows, out_LHRD)
        return out_LHRD

    def read_into(self, block: Block, out_LHRD: NDArray[Any], places: Indices) -> None:
        """Read the block into `out_LHRD`, its row i at row `places[i]`."""
        array = self._array(block)
        layers, heads = (axis.indices for axis in self._axes(array))
        rows = self.rows(block)
        array.reader.read_into(array.prefix, array.layout, layers, heads, rows, out_LHRD, places)

    def shape(self, block: Block) -> tuple[int, int, int]:
        """Return (layers, heads, head size) of the pick."""
        array = self._array(block)
        layers, heads = self._axes(array)
        return len(layers), len(heads), array.layout.record.head_size

    def dtype(self, block: Block) -> np.dtype[Any]:
        """Return the stored dtype."""
        return DTYPES[self._array(block).layout.record.dtype]

    def cost(self, block: Block) -> ReadCost:
        """Return what `read` of the block would cost; reads nothing."""
        array = self._array(block)
        layers, heads = self._axes(array)
        rows = self.rows(block)
        return array.reader.cost_of(array.layout, layers.indices, heads.indices, rows)

    def rows(self, block: Block) -> Indices:
        """Return the block's rows on its unit's token axis."""
        stored = self._index.stored_places(block.unit)
        parts = [prompt.places + stored[prompt.place] for prompt in block.prompts]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _array(self, block: Block) -> PromptArray:
        return self._arrays.of(self._index.stored(block.prompts[0].row), self.site)

    def _axes(self, array: PromptArray) -> tuple[AxisSelection, AxisSelection]:
        layers, heads, _ = array.select(self._layers, self._heads, None, by_place=False)
        return layers, heads


def split_rows(block: Block) -> Iterator[tuple[PromptRows, slice]]:
    """Yield each prompt of a block with its slice of the block's rows."""
    start = 0
    for prompt in block.prompts:
        yield prompt, slice(start, start + len(prompt.places))
        start += len(prompt.places)


def _stored_places(summary: UnitSummary) -> list[int]:
    return [i for i, outcome in enumerate(summary.outcomes) if outcome is Outcome.STORED]


def _named_places(
    index: RunIndex, rows: Indices, summaries: dict[int, UnitSummary]
) -> dict[int, list[int]]:
    wanted: dict[int, set[int]] = {}
    units = index.units_of(rows)
    for row, unit in zip(rows.tolist(), units.tolist(), strict=True):
        summary = summaries.get(unit)
        place = None if summary is None else row - summary.first_prompt
        if summary is None or place is None or summary.outcomes[place] is not Outcome.STORED:
            index.stored(row)
            raise DamagedObject(f"the commit of unit {unit} changed while it was read")
        wanted.setdefault(unit, set()).add(place)
    return {unit: sorted(places) for unit, places in wanted.items()}


def _cut(
    summary: UnitSummary, places: Sequence[int], pos: Choice, block_rows: int
) -> Iterator[Block]:
    held: list[PromptRows] = []
    count = 0
    for place in places:
        first = summary.first_positions[place]
        positions = np.arange(first, first + summary.num_rows[place], dtype=np.int64)
        picked = select("pos", positions, pos)
        if len(picked) == 0:
            continue
        held.append(PromptRows(summary.first_prompt + place, place, picked.indices, picked.labels))
        count += len(picked)
        if count >= block_rows:
            yield Block(summary.unit, tuple(held))
            held, count = [], 0
    if held:
        yield Block(summary.unit, tuple(held))
