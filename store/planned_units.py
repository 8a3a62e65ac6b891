"""Which prompts each unit of a plan has, and whether a commit covers them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store.plan import UNIT_FIELDS
from store.run_format import Commit

_NO_UNITS = UNIT_FIELDS.empty_table()


@dataclass(frozen=True, slots=True)
class PlannedUnits:
    """Which prompts each planned unit has, ascending by unit."""

    unit: NDArray[np.int64]
    first_prompt: NDArray[np.int64]
    num_prompts: NDArray[np.int64]

    @classmethod
    def of(cls, tables: list[pa.Table]) -> PlannedUnits:
        """Return the units of the plan's tables, in plan order."""
        names = ("unit", "first_prompt", "num_prompts")
        whole = pa.concat_tables([table.select(names) for table in tables] or [_NO_UNITS])
        return cls(*(np.asarray(whole[name].to_numpy(), np.int64) for name in names))

    def contradictions(self, commit: Commit) -> Iterator[str]:
        """Yield where a commit does not cover the prompts of its unit."""
        place = int(np.searchsorted(self.unit, commit.unit))
        if place == len(self.unit) or self.unit[place] != commit.unit:
            yield "no plan segment has this unit"
            return
        planned = int(self.first_prompt[place]), int(self.num_prompts[place])
        stated = commit.first_prompt, len(commit.prompts.outcome)
        if planned != stated:
            yield (
                f"covers {stated[1]} prompts from {stated[0]}, the plan's unit has {planned[1]} "
                f"from {planned[0]}"
            )
