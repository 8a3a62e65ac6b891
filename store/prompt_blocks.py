"""Many stored prompts as blocks: runs of neighbouring rows of one unit that are read together.

Knows the index and unit arrays; never knows what the rows are for. Short prompts share chunks, so
reading prompt by prompt would read a chunk once for each of them; a block reads it once. Batches
and reductions stream blocks, so their memory is a block's, not the run's.

Legend: L layers, H heads, R rows of a block (its prompts back to back), D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store.codec import DTYPES
from store.commit_cache import UnitSummary
from store.errors import DamagedObject, FormatError
from store.explain import ReadCost
from store.prompt_names import Prompt, prompt_list
from store.run_index import RunIndex
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
    """Prompts of one unit, near each other on its token axis; arrays have one entry a prompt.

    Kept small, because a plan of a stream holds all of its blocks: a prompt's rows are worked out
    when its block is read.
    """

    unit: int
    first_prompt: int
    places: Indices
    lengths: Indices
    first_positions: Indices
    pos: Choice
    num_rows: int

    @property
    def first_row(self) -> int:
        """The row, in the prompts table, of the block's first prompt."""
        return self.first_prompt + int(self.places[0])

    def prompts(self) -> list[PromptRows]:
        """Return the wanted rows of each prompt."""
        found = []
        columns = (self.places, self.lengths, self.first_positions)
        for place, length, first in zip(*(column.tolist() for column in columns), strict=True):
            positions = np.arange(first, first + length, dtype=np.int64)
            if self.pos is None:
                rows = np.arange(length, dtype=np.int64)
                found.append(PromptRows(self.first_prompt + place, place, rows, positions))
            else:
                picked = select("pos", positions, self.pos)
                found.append(
                    PromptRows(self.first_prompt + place, place, picked.indices, picked.labels)
                )
        return found

    def joined(self, other: Block) -> Block:
        """Return this block with the prompts of `other`, of the same unit, after its own."""
        return replace(
            self,
            places=np.concatenate([self.places, other.places]),
            lengths=np.concatenate([self.lengths, other.lengths]),
            first_positions=np.concatenate([self.first_positions, other.first_positions]),
            num_rows=self.num_rows + other.num_rows,
        )


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
        wanted = {unit: np.flatnonzero(summary.stored) for unit, summary in summaries.items()}
        missing = index.states.missing()
    else:
        rows = index.names.rows_of(prompt_list(prompts))
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
        array, rows = self._found(block)
        picked, heads = self._axes(array)
        wanted = picked.indices if layers is None else picked.indices[layers]
        shape = (len(wanted), len(heads), block.num_rows, array.layout.record.head_size)
        out_LHRD = np.empty(shape, DTYPES[array.layout.record.dtype])
        array.reader.read_into(array.prefix, array.layout, wanted, heads.indices, rows, out_LHRD)
        return out_LHRD

    def read_into(self, block: Block, out_LHRD: NDArray[Any], places: Indices) -> None:
        """Read the block into `out_LHRD`, its row i at row `places[i]`."""
        array, rows = self._found(block)
        layers, heads = (axis.indices for axis in self._axes(array))
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
        array, rows = self._found(block)
        layers, heads = self._axes(array)
        return array.reader.cost_of(array.layout, layers.indices, heads.indices, rows)

    def _found(self, block: Block) -> tuple[PromptArray, Indices]:
        """Return the array of the block's unit and the block's rows on its token axis.

        Both are of one commit, and its rows are those that the block was cut from: a repair may
        have taken its place since. Raises `DamagedObject` where they are not, `FormatError` where
        the rows of a prompt contradict the plan, as the read of that prompt does.
        """
        found = self._index.stored(block.first_row)
        held = found.commit.prompts
        problems = self._index.row_problems(found.commit)
        for place, length, first in zip(
            block.places.tolist(),
            block.lengths.tolist(),
            block.first_positions.tolist(),
            strict=True,
        ):
            stated = held.num_rows[place], held.first_position[place]
            if stated != (length, first):
                raise DamagedObject(
                    f"the commit of unit {block.unit} changed while it was read: prompt row "
                    f"{block.first_prompt + place} has {stated[0]} rows "
                    f"from position {stated[1]}, not {length} from {first}; begin the stream "
                    "anew, and if that does not help run `attnstore verify --deep`"
                )
            if place in problems:
                raise FormatError(
                    f"the commit of unit {block.unit}: {problems[place]}; run `attnstore verify`"
                )
        parts = [prompt.places + held.first_row[prompt.place] for prompt in block.prompts()]
        rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return self._arrays.of(found, self.site), rows

    def _array(self, block: Block) -> PromptArray:
        return self._arrays.of(self._index.stored(block.first_row), self.site)

    def _axes(self, array: PromptArray) -> tuple[AxisSelection, AxisSelection]:
        layers, heads, _ = array.select(self._layers, self._heads, None, by_place=False)
        return layers, heads


def split_rows(block: Block) -> Iterator[tuple[PromptRows, slice]]:
    """Yield each prompt of a block with its slice of the block's rows."""
    start = 0
    for prompt in block.prompts():
        yield prompt, slice(start, start + len(prompt.places))
        start += len(prompt.places)


def _named_places(
    index: RunIndex, rows: Indices, summaries: dict[int, UnitSummary]
) -> dict[int, Indices]:
    wanted: dict[int, set[int]] = {}
    units = index.units_of(rows)
    for row, unit in zip(rows.tolist(), units.tolist(), strict=True):
        summary = summaries.get(unit)
        place = None if summary is None else row - summary.first_prompt
        if summary is None or place is None or not summary.stored[place]:
            index.stored(row)
            raise DamagedObject(f"the commit of unit {unit} changed while it was read")
        wanted.setdefault(unit, set()).add(place)
    return {unit: np.asarray(sorted(places), np.int64) for unit, places in wanted.items()}


def _cut(summary: UnitSummary, places: Indices, pos: Choice, block_rows: int) -> Iterator[Block]:
    lengths, firsts = summary.num_rows[places], summary.first_positions[places]
    counts = lengths
    if pos is not None:
        counts = np.asarray(
            [
                len(select("pos", np.arange(first, first + length), pos))
                for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True)
            ],
            np.int64,
        )
    kept = counts > 0
    places, lengths, firsts, counts = places[kept], lengths[kept], firsts[kept], counts[kept]
    start = 0
    ends = np.cumsum(counts)
    while start < len(places):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + block_rows)) + 1
        part = slice(start, min(stop, len(places)))
        yield Block(
            unit=summary.unit,
            first_prompt=summary.first_prompt,
            places=places[part],
            lengths=lengths[part],
            first_positions=firsts[part],
            pos=pos,
            num_rows=int(counts[part].sum()),
        )
        start = stop
