"""Which units of a run are committed, and one row of figures for each. Knows no arrays."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from store import keys
from store.commit import read_commit_leniently, require_run
from store.errors import RunError
from store.objects.protocol import ObjectStore
from store.run_format import Commit, Outcome

COLUMNS = (
    "unit", "repair", "first_prompt", "num_prompts", "stored", "failed", "skipped", "rows", "bytes",
)  # fmt: skip
T = TypeVar("T")
R = TypeVar("R")
Mapper = Callable[[Callable[[T], R], Iterable[T]], Iterable[R]]


@dataclass(frozen=True, slots=True)
class PromptException:
    """A prompt of a committed unit that is not stored. `prompt` is its run-wide number."""

    prompt: int
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class UnitRow:
    """What a commit says of its unit, without its objects. Fields as in `COLUMNS`."""

    unit: int
    repair: int
    first_prompt: int
    num_prompts: int
    stored: int
    failed: int
    skipped: int
    rows: int
    bytes: int
    exceptions: tuple[PromptException, ...] = ()

    @classmethod
    def of(cls, commit: Commit) -> UnitRow:
        """Return the row of a commit."""
        prompts = commit.prompts
        exceptions = tuple(
            PromptException(
                commit.first_prompt + place, outcome, prompts.reasons.get(str(place), "")
            )
            for place, outcome in enumerate(prompts.outcome)
            if outcome is not Outcome.STORED
        )
        failed = sum(one.outcome is Outcome.FAILED for one in exceptions)
        return cls(
            unit=commit.unit,
            repair=commit.repair,
            first_prompt=commit.first_prompt,
            num_prompts=len(prompts.outcome),
            stored=len(prompts.outcome) - len(exceptions),
            failed=failed,
            skipped=len(exceptions) - failed,
            rows=sum(prompts.num_rows),
            bytes=sum(record.bytes for record in commit.objects),
            exceptions=exceptions,
        )


@dataclass(slots=True)
class CommittedUnits:
    """Every committed unit of a run: rows of the newest snapshot, and the commits after it.

    `columns` holds the snapshot's rows by the names in `COLUMNS`, ascending by unit; `newer` the
    repair numbers of units that were committed or repaired since, whose rows are not read yet.
    """

    columns: dict[str, NDArray[np.int64]]
    exceptions: dict[int, list[PromptException]]
    """unit -> the prompts of the snapshot's unit that are not stored"""
    newer: dict[int, int]
    complete_folders: int = 0
    snapshot: str | None = None
    damage: list[str] = field(default_factory=list)
    """Why snapshots were passed over."""
    read: dict[tuple[int, int], UnitRow] = field(default_factory=dict)
    """(unit, repair) -> the row of that commit; what is in it stays, so that states may share it"""
    stamps: dict[int, str] = field(default_factory=dict)
    """unit -> what the listing told of its commit, of those in `newer` (`ObjectInfo.stamp`)"""
    damaged: dict[int, str] = field(default_factory=dict)
    """unit of `newer` -> why its commit could not be read, as `load` found"""
    lost: dict[int, int] = field(default_factory=dict)
    """Units that the snapshot names under this repair number, and whose commits are gone."""

    @classmethod
    def none(cls, damage: Sequence[str] = ()) -> CommittedUnits:
        """Return no unit at all, where no snapshot was there or sound."""
        columns = {name: np.zeros(0, np.int64) for name in COLUMNS}
        return cls(columns=columns, exceptions={}, newer={}, damage=list(damage))

    def __len__(self) -> int:
        return len(self.columns["unit"]) + sum(
            not self._is_in_snapshot(unit) for unit in self.newer
        )

    def units(self) -> NDArray[np.int64]:
        """Return the numbers of all committed units, ascending."""
        new = np.fromiter(self.newer, np.int64, len(self.newer))
        return np.union1d(self.columns["unit"], new)

    @property
    def last(self) -> int:
        """The highest number of a committed unit; -1 if there is none."""
        in_snapshot = int(self.columns["unit"][-1]) if len(self.columns["unit"]) else -1
        return max(in_snapshot, *self.newer, -1)

    def key(self, unit: int) -> str | None:
        """Return the name of the commit that counts for a unit, or None if it has none."""
        if unit in self.newer:
            return keys.commit_key(unit, self.newer[unit])
        place = self.place(unit)
        if place is None:
            return None
        return keys.commit_key(unit, int(self.columns["repair"][place]))

    def forget(self, units: NDArray[np.int64]) -> None:
        """Drop rows of the snapshot: of units whose commits are gone."""
        if not len(units):
            return
        self.lost = {unit: self.repair(unit) for unit in units.tolist()}
        kept = ~np.isin(self.columns["unit"], units)
        self.columns = {name: column[kept] for name, column in self.columns.items()}
        for unit in units.tolist():
            self.exceptions.pop(unit, None)

    def replaced_since(self, before: CommittedUnits) -> set[int]:
        """Return the units whose commits are gone, or were deleted and made again, since `before`.

        Of those newer than its snapshot: what a snapshot names is never made again under its name.
        """
        return {
            unit
            for unit, repair in before.newer.items()
            if self.key(unit) is None
            or (self.newer.get(unit) == repair and self.stamps[unit] != before.stamps[unit])
        }

    def unit_of(self, prompt: int) -> int | None:
        """Return the unit of a prompt by its run-wide number, if the snapshot's rows tell it."""
        first = self.columns["first_prompt"]
        place = int(np.searchsorted(first, prompt, side="right")) - 1
        if place < 0 or prompt >= first[place] + self.columns["num_prompts"][place]:
            return None
        return int(self.columns["unit"][place])

    def load(self, objects: ObjectStore, run_id: str, map_: Mapper[Any, Any] = map) -> None:
        """Read the commits that are newer than the snapshot; those read before are kept.

        One that is damaged, or of another run, is noted in `damaged`: its unit has no row.
        """

        def row_of(name: str) -> UnitRow | str:
            try:
                commit = read_commit_leniently(objects, name)
                require_run(commit, name, run_id)
            except RunError as error:
                return str(error)
            return UnitRow.of(commit)

        wanted = [
            one for one in self.newer.items() if one not in self.read and one[0] not in self.damaged
        ]
        found = map_(row_of, [keys.commit_key(*one) for one in wanted])
        for one, row in zip(wanted, found, strict=True):
            if isinstance(row, str):
                self.damaged[one[0]] = row
            else:
                self.read[one] = row

    def table(self) -> dict[str, NDArray[np.int64]]:
        """Return the rows of the committed units as columns, ascending by unit; `load` first.

        Those in `damaged` have none, whatever a snapshot says of the commit that theirs replaced.
        """
        newer = sorted(self.newer.items())
        rows = [self.read[one] for one in newer if one[0] not in self.damaged]
        kept = ~np.isin(self.columns["unit"], [unit for unit, _ in newer])
        merged = {
            name: np.concatenate(
                [self.columns[name][kept], np.array([getattr(r, name) for r in rows], np.int64)]
            )
            for name in COLUMNS
        }
        order = np.argsort(merged["unit"], kind="stable")
        return {name: column[order] for name, column in merged.items()}

    def all_exceptions(self, without: Container[int] = ()) -> list[PromptException]:
        """Return every prompt of a committed unit that is not stored, by number; `load` first.

        But those of the units in `without`.
        """
        found = [
            one
            for unit, exceptions in self.exceptions.items()
            if unit not in self.newer and unit not in without
            for one in exceptions
        ]
        found += [
            one
            for newer in self.newer.items()
            if newer[0] not in self.damaged and newer[0] not in without
            for one in self.read[newer].exceptions
        ]
        return sorted(found, key=lambda one: one.prompt)

    def repair(self, unit: int) -> int:
        """Return the highest repair number that the snapshot or a commit has for a unit, or 0."""
        place = self.place(unit)
        in_snapshot = 0 if place is None else int(self.columns["repair"][place])
        return max(in_snapshot, self.newer.get(unit, 0), self.lost.get(unit, 0))

    def place(self, unit: int) -> int | None:
        """Return a unit's row in `columns`, or None if the snapshot has none."""
        place = int(np.searchsorted(self.columns["unit"], unit))
        found = place < len(self.columns["unit"]) and self.columns["unit"][place] == unit
        return place if found else None

    def _is_in_snapshot(self, unit: int) -> bool:
        return self.place(unit) is not None
