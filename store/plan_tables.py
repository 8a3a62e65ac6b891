"""The plan's tables as a reader needs them: prompts, their tokens, and which unit holds which.

Knows plan segments; never knows commits or arrays. Nothing is read before it is asked for; then the
prompts table without tokens and the units come at once. Tokens of a small plan come along; those of
a large one are read a file at a time and the files used last are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store.errors import FormatError, PromptNotFound
from store.objects.protocol import ObjectStore
from store.plan import PROMPT_FIELDS, read_prompt_file, read_prompts, read_units
from store.run_format import PlanManifest

Mapper = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
Indices = NDArray[np.int64]
PromptTokens = tuple[NDArray[np.int32], list[str]]

SMALL_PLAN_TOKENS = 1 << 19
KEPT_TOKEN_FILES = 4
KEPT_TOKENS = 256
TOKEN_COLUMNS = ("token_ids", "token_strings")


@dataclass(frozen=True, slots=True)
class _Loaded:
    prompts: pa.Table
    units: Indices
    first_prompts: Indices
    tokens: pa.Table | None


class PlanTables:
    """The tables of a run's plan segments. Safe to use from several threads."""

    def __init__(
        self, objects: ObjectStore, segments: Sequence[PlanManifest], map_: Mapper
    ) -> None:
        self._objects = objects
        self._map = map_
        self.segments = list(segments)
        self._lock = threading.RLock()
        self._tables: _Loaded | None = None
        self._files: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._tokens: OrderedDict[int, PromptTokens] = OrderedDict()

    @property
    def num_prompts(self) -> int:
        return sum(segment.num_prompts for segment in self.segments)

    @property
    def num_units(self) -> int:
        return sum(segment.num_units for segment in self.segments)

    def prompts(self) -> pa.Table:
        """Return the prompts table without its token columns."""
        return self._loaded().prompts

    def units_of(self, rows: Indices) -> tuple[Indices, Indices]:
        """Return (unit, place in the unit) of each prompt row."""
        loaded = self._loaded()
        at = np.searchsorted(loaded.first_prompts, rows, side="right") - 1
        return loaded.units[at], rows - loaded.first_prompts[at]

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
        table, within = self._loaded().tokens, row
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

    def _loaded(self) -> _Loaded:
        with self._lock:
            if self._tables is None:
                self._tables = self._load()
            return self._tables

    def _load(self) -> _Loaded:
        if not self.segments:
            fields = [field for field in PROMPT_FIELDS if field.name not in TOKEN_COLUMNS]
            none = np.zeros(0, np.int64)
            return _Loaded(pa.schema(fields).empty_table(), none, none, None)
        num_tokens = sum(segment.num_tokens for segment in self.segments)
        is_small = num_tokens <= SMALL_PLAN_TOKENS
        without = () if is_small else TOKEN_COLUMNS

        def read(what: tuple[PlanManifest, bool]) -> pa.Table:
            segment, wants_prompts = what
            if wants_prompts:
                return read_prompts(self._objects, segment, without=without)
            return read_units(self._objects, segment)

        wanted = [(segment, kind) for kind in (True, False) for segment in self.segments]
        tables = self._map(read, wanted)
        prompts, units = tables[: len(self.segments)], tables[len(self.segments) :]
        for segment, part in zip(self.segments, prompts, strict=True):
            if part.num_rows != segment.num_prompts:
                raise FormatError(
                    f"plan segment {segment.segment} has {part.num_rows} prompts, its manifest "
                    f"says {segment.num_prompts}; run `attnstore verify`"
                )
        whole = pa.concat_tables(prompts, promote_options="permissive")
        unit_table = pa.concat_tables(units, promote_options="default").sort_by("first_prompt")
        return _Loaded(
            prompts=whole.drop_columns(list(TOKEN_COLUMNS)) if is_small else whole,
            units=np.asarray(unit_table["unit"].to_numpy(), np.int64),
            first_prompts=np.asarray(unit_table["first_prompt"].to_numpy(), np.int64),
            tokens=whole.select(list(TOKEN_COLUMNS)) if is_small else None,
        )
