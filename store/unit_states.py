"""What became of every planned prompt, told from one row a unit: no commit of them all is held.

Knows the plan's tables and the committed units' rows; never knows arrays, nor a commit's rows and
positions. A commit that cannot be read, or that is of other prompts than its unit, is damage of its
own unit alone: those prompts are `damaged`, and everything else of the run is what it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store.commit_cache import UnitSummary
from store.committed_units import CommittedUnits, Mapper
from store.errors import DamagedObject
from store.objects.protocol import ObjectStore
from store.plan_tables import PlanTables
from store.planned_units import require_planned
from store.run_format import Outcome

PENDING = "pending"
"""The state of a prompt whose unit has no commit yet."""
DAMAGED = "damaged"
"""The state of a prompt whose unit's commit cannot be read, or is not of the unit's prompts."""

Columns = dict[str, NDArray[np.int64]]


class UnitStates:
    """The units and prompts of one state of a run."""

    def __init__(
        self,
        objects: ObjectStore,
        run_id: str,
        plan: PlanTables,
        committed: CommittedUnits,
        map_: Mapper[Any, Any],
    ) -> None:
        self._objects = objects
        self._run_id = run_id
        self._plan = plan
        self._committed = committed
        self._map = map_

    def rows(self) -> Columns:
        """Return one row per readable committed unit as columns (`COLUMNS`), ascending.

        Costs the newest snapshot, read when the run was opened, and the commits after it.
        """
        self._committed.load(self._objects, self._run_id, self._map)
        return self._committed.table()

    def unreadable(self) -> dict[int, str]:
        """Return why the commit of each unit that has one and no row cannot be read."""
        self._committed.load(self._objects, self._run_id, self._map)
        return dict(self._committed.damaged)

    def unreadable_prompts(self) -> int:
        """Return how many prompts the plan has in units whose commits cannot be read."""
        planned = [unit for unit in self.unreadable() if unit < self._plan.num_units]
        return sum(len(self._prompts_of(unit)) for unit in planned)

    def damaged(self) -> dict[int, str]:
        """Return the units whose commits cannot be read or are not of the plan's prompts, and why.

        Raises `DamagedObject` where units are committed that no plan segment has.
        """
        return self._sound()[1]

    def missing(self) -> dict[str, int]:
        """Return how many prompts are not stored, by state; states without any are left out."""
        rows, damaged = self._sound()
        counts = {str(o): int(rows[str(o)].sum()) for o in Outcome if o is not Outcome.STORED}
        counts[DAMAGED] = sum(len(self._prompts_of(unit)) for unit in damaged)
        told = int(rows["num_prompts"].sum()) + counts[DAMAGED]
        counts[PENDING] = self._plan.num_prompts - told
        return {state: count for state, count in counts.items() if count}

    def of_prompts(self) -> tuple[pa.Array, pa.Array]:
        """Return every prompt's status and reason, by row; warns of damaged units."""
        rows, damaged = self._sound()
        status = np.full(self._plan.num_prompts, PENDING, object)
        reason = np.full(self._plan.num_prompts, None, object)
        for first, count in zip(rows["first_prompt"], rows["num_prompts"], strict=True):
            status[first : first + count] = str(Outcome.STORED)
        for one in self._committed.all_exceptions(damaged):
            status[one.prompt], reason[one.prompt] = str(one.outcome), one.reason
        for unit, why in damaged.items():
            prompts = self._prompts_of(unit)
            status[prompts.start : prompts.stop] = DAMAGED
            reason[prompts.start : prompts.stop] = why
        warn_of_damage(damaged, len(self._committed))
        return pa.array(status, pa.string()), pa.array(reason, pa.string())

    def summaries(self, units: Sequence[int]) -> dict[int, UnitSummary]:
        """Return the summaries of the units that their rows and the plan describe well enough.

        Raises `DamagedObject` where one of them is damaged.
        """
        if not units:
            return {}
        rows, damaged = self._sound()
        for unit in units:
            if unit in damaged:
                raise DamagedObject(
                    f"unit {unit} is damaged: {damaged[unit]}; to leave its prompts out, give "
                    "prompts=run.where(\"status = 'stored'\")"
                )
        exceptions = self._committed.all_exceptions(damaged)
        failed = np.asarray([one.prompt for one in exceptions], np.int64)
        lengths = np.asarray(self._plan.prompts()["num_tokens"].to_numpy(), np.int64)
        found: dict[int, UnitSummary] = {}
        for unit, at in zip(units, np.searchsorted(rows["unit"], units).tolist(), strict=True):
            first, count = int(rows["first_prompt"][at]), int(rows["num_prompts"][at])
            stored = np.ones(count, bool)
            low, high = np.searchsorted(failed, [first, first + count])
            stored[failed[low:high] - first] = False
            num_rows = np.where(stored, lengths[first : first + count], 0)
            if int(num_rows.sum()) == rows["rows"][at] and int(stored.sum()) == rows["stored"][at]:
                nowhere = np.zeros(count, np.int64)
                found[unit] = UnitSummary(unit, first, stored, num_rows, nowhere)
        return found

    def _sound(self) -> tuple[Columns, dict[int, str]]:
        """Return the rows of the units that are what the plan says, and why the others are not."""
        rows, damaged = self.rows(), self.unreadable()
        require_planned(self._committed, self._plan.segments)
        planned, counts = self._plan.spans_of(rows["unit"])
        other = (rows["first_prompt"] != planned) | (rows["num_prompts"] != counts)
        for at in np.flatnonzero(other).tolist():
            unit = int(rows["unit"][at])
            stated = int(rows["first_prompt"][at]), int(rows["num_prompts"][at])
            problem = self._plan.span_problem(unit, *stated)
            damaged[unit] = f"{self._committed.key(unit)} {problem}; run `attnstore verify`"
        sound = {name: column[~other] for name, column in rows.items()} if other.any() else rows
        return sound, dict(sorted(damaged.items()))

    def _prompts_of(self, unit: int) -> range:
        (first,), (count,) = self._plan.spans_of(np.asarray([unit], np.int64))
        return range(int(first), int(first + count))


def warn_of_damage(damaged: dict[int, str], committed: int, stacklevel: int = 5) -> None:
    """Warn that units cannot be read, naming the first; say nothing where all can."""
    if not damaged:
        return
    unit, why = next(iter(damaged.items()))
    warnings.warn(
        f"{len(damaged)} of {committed} committed units cannot be read, and their prompts are "
        f"{DAMAGED!r}: unit {unit}: {why}",
        RuntimeWarning,
        stacklevel=stacklevel,
    )
