"""Whose rows an engine step computes, and where each of them belongs. Pure arithmetic, numpy only.

A step's tensors are one packed slab: the tokens of every scheduled request, back to back. `Span`
says whose they are, `UnitLayout` says which row of its unit each (prompt, position) is, and
`plan_step` turns both into runs: consecutive slab rows that are consecutive unit rows too. Rows are
identified by (prompt, position) alone, never by order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from capture.errors import RowsMissing

NOT_RUN = -1


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one request in a step, in slab order. `unit` None: no row of it is wanted."""

    unit: int | None
    prompt: int
    position: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Positions:
    """Which positions of every prompt are kept: a slice without steps, negatives from the end."""

    start: int | None = None
    stop: int | None = None

    def of(self, num_positions: int) -> tuple[int, int]:
        """Return (first position kept, how many) of a prompt of `num_positions`; (0, 0) if none."""
        first, stop, _ = slice(self.start, self.stop).indices(num_positions)
        return (first, stop - first) if stop > first else (0, 0)


ALL_POSITIONS = Positions()


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Where each prompt's rows lie on the unit's token axis, prompts back to back.

    `key` names the attempt inside this engine. The arrays are int64, one entry per prompt of the
    unit: where its rows begin, how many are kept, the position of the first one kept, and how many
    positions the engine may compute. A prompt that does not run has `first_row` NOT_RUN, no rows.
    """

    key: int
    unit: int
    attempt: str
    first_row: np.ndarray
    num_rows: np.ndarray
    first_position: np.ndarray
    num_positions: np.ndarray

    @classmethod
    def plan(
        cls,
        key: int,
        unit: int,
        attempt: str,
        num_positions: Sequence[int],
        kept: Positions = ALL_POSITIONS,
    ) -> UnitLayout:
        """Lay out prompts of so many positions, in order; 0: the prompt does not run."""
        lengths = np.asarray(num_positions, dtype=np.int64).reshape(-1)
        ranges = [kept.of(int(length)) for length in lengths]
        rows = np.asarray([count for _, count in ranges], np.int64).reshape(-1)
        firsts = np.asarray([first for first, _ in ranges], np.int64).reshape(-1)
        starts = np.cumsum(rows) - rows
        return cls(key, unit, attempt, np.where(rows > 0, starts, NOT_RUN), rows, firsts, lengths)

    @property
    def total_rows(self) -> int:
        return int(self.num_rows.sum())

    def prompt_at(self, row: int) -> tuple[int, int]:
        """Return (prompt, position) of a unit row, for messages."""
        prompt = int(np.flatnonzero((self.num_rows > 0) & (self.first_row <= row))[-1])
        return prompt, row - int(self.first_row[prompt]) + int(self.first_position[prompt])


@dataclass(frozen=True, slots=True)
class Run:
    """`num_rows` staged rows from `staged` that are the unit's rows from `row`."""

    unit: int
    row: int
    num_rows: int
    staged: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """What to take of a step's slab.

    `index` picks slab rows into staged order (int64), or is None where the slab already is in
    staged order and wanted whole. `runs` cover the staged rows in order.
    """

    num_rows: int
    index: np.ndarray | None
    runs: tuple[Run, ...]


def plan_step(spans: Sequence[Span], layouts: Mapping[int, UnitLayout]) -> StepRows:
    """Plan a step: staged rows sorted by (unit, row), joined into as few runs as possible.

    Spans of units that `layouts` does not know (sealed attempts) are left out. Raises
    `RowsMissing` where a span lies outside its prompt, which would be a row of nobody.
    """
    placed: list[tuple[int, int, int, int]] = []
    slab_rows = 0
    for span in spans:
        if span.unit is not None and (layout := layouts.get(span.unit)) is not None:
            limit = int(layout.num_positions[span.prompt])
            if span.position < 0 or span.position + span.num_rows > limit:
                raise RowsMissing(
                    f"unit {layout.unit}: the engine computed positions {span.position} to "
                    f"{span.position + span.num_rows - 1} of prompt {span.prompt}, which has "
                    f"{limit} rows; this is a fault of the capture, please report it"
                )
            first = int(layout.first_position[span.prompt])
            kept_from = max(span.position, first)
            kept_to = min(span.position + span.num_rows, first + int(layout.num_rows[span.prompt]))
            if kept_from < kept_to:
                row = int(layout.first_row[span.prompt]) + kept_from - first
                slab = slab_rows + kept_from - span.position
                placed.append((span.unit, row, kept_to - kept_from, slab))
        slab_rows += span.num_rows
    placed.sort()
    runs: list[Run] = []
    pieces: list[np.ndarray] = []
    staged, in_order = 0, True
    for unit, row, num_rows, slab in placed:
        in_order = in_order and slab == staged
        pieces.append(np.arange(slab, slab + num_rows, dtype=np.int64))
        last = runs[-1] if runs else None
        if last is not None and last.unit == unit and last.row + last.num_rows == row:
            runs[-1] = Run(unit, last.row, last.num_rows + num_rows, last.staged)
        else:
            runs.append(Run(unit, row, num_rows, staged))
        staged += num_rows
    whole = in_order and staged == slab_rows
    index = None if whole or not pieces else np.concatenate(pieces)
    return StepRows(staged, index, tuple(runs))
