"""The plan's tables as a reader needs them: prompts, their tokens, and which unit holds which.

Knows plan segments; never knows commits or arrays. Nothing is read before it is asked for (or
begun); then the prompts table without tokens and the units come at the same time, and who needs the
units alone does not wait for the prompts. Tokens of a small plan come along; those of a large one
are read a file at a time and the files used last are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store.ahead import Begin, Begun
from store.errors import FormatError, PromptNotFound
from store.objects.protocol import ObjectStore
from store.plan import (
    PROMPT_FIELDS,
    UNIT_FIELDS,
    join_tables,
    read_prompt_file,
    read_prompts,
    read_units,
)
from store.run_format import PlanManifest

Indices = NDArray[np.int64]
PromptTokens = tuple[NDArray[np.int32], list[str]]

SMALL_PLAN_TOKENS = 1 << 19
KEPT_TOKEN_FILES = 4
KEPT_TOKENS = 256
TOKEN_COLUMNS = ("token_ids", "token_strings")


@dataclass(frozen=True, slots=True)
class _Prompts:
    prompts: pa.Table
    tokens: pa.Table | None


@dataclass(frozen=True, slots=True)
class _Units:
    units: Indices
    first_prompts: Indices


@dataclass(frozen=True, slots=True)
class _Reading:
    """The tables of every segment while they are on their way."""

    prompts: list[Begun[pa.Table]]
    units: list[Begun[pa.Table]]


class PlanTables:
    """The tables of a run's plan segments. Safe to use from several threads."""

    def __init__(
        self, objects: ObjectStore, segments: Sequence[PlanManifest], begin: Begin = Begun
    ) -> None:
        self._objects = objects
        self._begin = begin
        self.segments = list(segments)
        self._lock = threading.RLock()
        self._reading: _Reading | None = None
        self._prompts: _Prompts | None = None
        self._units: _Units | None = None
        self._files: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._tokens: OrderedDict[int, PromptTokens] = OrderedDict()

    @property
    def num_prompts(self) -> int:
        return sum(segment.num_prompts for segment in self.segments)

    @property
    def num_units(self) -> int:
        return sum(segment.num_units for segment in self.segments)

    @property
    def only_unit(self) -> int | None:
        """The number of the plan's unit if it has no other; then no table is read to tell it."""
        units = [one.first_unit for one in self.segments if one.num_units]
        return units[0] if self.num_units == 1 else None

    def prompts(self) -> pa.Table:
        """Return the prompts table without its token columns."""
        return self._read_prompts().prompts

    def begin(self) -> bool:
        """Begin to read the tables and return True, unless that was done."""
        with self._lock:
            if self._reading is not None:
                return False
            others = self.segments if self.only_unit is None else []
            self._reading = _Reading(
                [self._begin(partial(self._prompts_of, one)) for one in self.segments],
                [self._begin(partial(read_units, self._objects, one)) for one in others],
            )
            return True

    def units_of(self, rows: Indices) -> tuple[Indices, Indices]:
        """Return (unit, place in the unit) of each prompt row."""
        loaded = self._read_units()
        at = np.searchsorted(loaded.first_prompts, rows, side="right") - 1
        return loaded.units[at], rows - loaded.first_prompts[at]

    def spans_of(self, units: Indices) -> tuple[Indices, Indices]:
        """Return (first prompt, number of prompts) of each of these planned units."""
        firsts = self._read_units().first_prompts  # Units are numbered from 0 without a gap.
        return firsts[units], np.append(firsts[1:], self.num_prompts)[units] - firsts[units]

    def span_problem(self, unit: int, first_prompt: int, num_prompts: int) -> str | None:
        """Return how a unit of these prompts is not the plan's unit of this number, or None."""
        if unit >= self.num_units:
            return f"is of unit {unit}, the plan has {self.num_units} units"
        firsts = self._read_units().first_prompts
        first = int(firsts[unit])
        count = (int(firsts[unit + 1]) if unit + 1 < len(firsts) else self.num_prompts) - first
        if (first_prompt, num_prompts) == (first, count):
            return None
        return (
            f"covers {num_prompts} prompts from {first_prompt}, the plan's unit has {count} from "
            f"{first}"
        )

    def tokens(self, row: int) -> PromptTokens:
        """Return a prompt's token ids and strings."""
        with self._lock:
            kept = self._tokens.get(row)
            if kept is None:
                kept = self._tokens[row] = self._read_tokens(row)
                while len(self._tokens) > KEPT_TOKENS:
                    self._tokens.popitem(last=False)
            return kept

    def _read_tokens(self, row: int) -> PromptTokens:
        table, within = self._read_prompts().tokens, row
        if table is None:
            table, within = self._token_file(row)
        ids, strings = (table[name][within] for name in TOKEN_COLUMNS)
        return np.asarray(ids.values, np.int32), strings.as_py()

    def _token_file(self, row: int) -> tuple[pa.Table, int]:
        """Return the tokens of the plan file that holds a prompt, and its row in it."""
        segment, file, within = self._file_of(row)
        key = (segment.segment, file)
        table = self._files.pop(key, None)
        if table is None:
            table = read_prompt_file(self._objects, segment, file, TOKEN_COLUMNS)
        self._files[key] = table
        while len(self._files) > KEPT_TOKEN_FILES:
            self._files.popitem(last=False)
        return table, within

    def _file_of(self, row: int) -> tuple[PlanManifest, int, int]:
        """Return (segment, place of the file in it, row in the file)."""
        for segment in self.segments:
            within = row - segment.first_prompt
            if within < segment.num_prompts:
                for place, file in enumerate(segment.prompts):
                    if within < file.rows:
                        return segment, place, within
                    within -= file.rows
        raise PromptNotFound(f"there is no prompt row {row}; the run has {self.num_prompts}")

    def _read_prompts(self) -> _Prompts:
        with self._lock:
            if self._prompts is None:
                whole = self._joined("prompts", PROMPT_FIELDS)
                is_small = self._is_small
                self._prompts = _Prompts(
                    prompts=whole.drop_columns(list(TOKEN_COLUMNS)) if is_small else whole,
                    tokens=whole.select(list(TOKEN_COLUMNS)) if is_small else None,
                )
            return self._prompts

    def _read_units(self) -> _Units:
        with self._lock:
            if self._units is None and self.only_unit is not None:
                # The manifest tells all of a single unit.
                first = next(one.first_prompt for one in self.segments if one.num_units)
                self._units = _Units(np.array([self.only_unit]), np.array([first]))
            if self._units is None:
                table = self._joined("units", UNIT_FIELDS).sort_by("first_prompt")
                self._units = _Units(
                    units=np.asarray(table["unit"].to_numpy(), np.int64),
                    first_prompts=np.asarray(table["first_prompt"].to_numpy(), np.int64),
                )
            return self._units

    def _joined(self, kind: Literal["prompts", "units"], without_any: pa.Schema) -> pa.Table:
        """Return the tables of all segments as one."""
        self.begin()
        reading = self._reading
        assert reading is not None
        try:
            parts = [one.result() for one in getattr(reading, kind)]
        except BaseException:
            self._reading = None
            raise
        parts = parts or [without_any.empty_table()]
        return join_tables(parts)

    @property
    def _is_small(self) -> bool:
        return sum(segment.num_tokens for segment in self.segments) <= SMALL_PLAN_TOKENS

    def _prompts_of(self, segment: PlanManifest) -> pa.Table:
        without = () if self._is_small else TOKEN_COLUMNS
        table = read_prompts(self._objects, segment, without=without)
        if table.num_rows != segment.num_prompts:
            raise FormatError(
                f"plan segment {segment.segment} has {table.num_rows} prompts, its manifest "
                f"says {segment.num_prompts}; run `attnstore verify`"
            )
        return table
