"""Which prompts a reader means: ids and rows, one or many, to rows of the prompts table.

Knows the plan's prompts table; never knows units or commits, so that a name means the same in every
state of a run. An id is a text and a row is a number: neither is ever taken for the other.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store.errors import PromptNotFound
from store.plan_tables import PlanTables
from store.selection import integer

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Prompt = str | int
"""A prompt's id, or its row in the prompts table."""

SEARCHED_IDS = 20_000
"""How many ids are searched for one that is spelled nearly like an unknown one."""


def is_one_prompt(prompts: Prompt | Iterable[Prompt]) -> TypeIs[Prompt]:
    """Whether this names one prompt rather than several; bytes count as one, and name none."""
    return isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable)


def prompt_list(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return several prompts as a list. Raises `PromptNotFound` where only one is given."""
    if is_one_prompt(prompts):
        raise PromptNotFound(f"{prompts!r} is no list of prompts: give ids or rows in a list")
    return list(prompts)


class PromptNames:
    """The names of a plan's prompts."""

    def __init__(self, plan: PlanTables) -> None:
        self._plan = plan

    def id_of(self, row: int) -> str:
        """Return the id of the prompt in this row."""
        return str(self._ids[row].as_py())

    def row_of(self, prompt: Prompt) -> int:
        """Return a prompt's row. Raises `PromptNotFound`, naming ids that are spelled nearly so."""
        return self._row_of_id(prompt) if isinstance(prompt, str) else self.row_of_number(prompt)

    def rows_of(self, prompts: Sequence[Prompt]) -> NDArray[np.int64]:
        """Return the rows of many prompts at once. Raises `PromptNotFound` for an unknown one."""
        ids = [prompt for prompt in prompts if isinstance(prompt, str)]
        if ids:
            for one in ids:
                if not _is_text(one):
                    self._row_of_id(one)
            column = self._ids
            found = pc.index_in(pa.array(ids, column.type), value_set=column)
            if found.null_count:
                missing = ids[pc.index(found.is_null(), True).as_py()]
                self._row_of_id(missing)
            place = iter(found.to_pylist())
            rows = [next(place) if isinstance(p, str) else self.row_of_number(p) for p in prompts]
            return np.asarray(rows, np.int64)
        return np.asarray([self.row_of_number(p) for p in prompts], np.int64)  # type: ignore[arg-type]

    def row_of_number(self, prompt: int) -> int:
        """Return the row that a number names, negative ones from the end; reads no table."""
        total = self._plan.num_prompts
        row = integer(prompt)
        if row is None:
            raise PromptNotFound(
                f"{prompt!r} names no prompt: give its id (a str) or its row (an int), "
                f"not {type(prompt).__name__}"
            )
        if not -total <= row < total:
            raise PromptNotFound(
                f"there is no prompt row {prompt}; the run has rows 0..{total - 1}"
            )
        return row % total

    @property
    def _ids(self) -> pa.ChunkedArray:
        return self._plan.prompts()["prompt_id"]

    def _row_of_id(self, prompt: str) -> int:
        if _is_text(prompt):
            row = int(pc.index(self._ids, prompt).as_py())
            if row >= 0:
                return row
        some = self._ids.slice(0, SEARCHED_IDS).to_pylist()
        near = difflib.get_close_matches(prompt, some, 3, 0.5) or some[:3]
        raise PromptNotFound(
            f"there is no prompt {prompt!r} in the run; nearest: {', '.join(map(repr, near))}; "
            f"run.prompts lists all {self._plan.num_prompts}"
        )


def _is_text(prompt: str) -> bool:
    """Whether a string is text: with half of a surrogate pair in it it is no id that can be."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True
