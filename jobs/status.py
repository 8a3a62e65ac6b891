"""What a run holds by now, from storage alone: works with no cluster running and no config at hand.

Units and prompts are counted from the commits, never guessed. A unit counts as quarantined, not as
committed, when its commit records that none of its prompts survived being run.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from jobs.schedule import QUARANTINED
from store.commit import committed_units, read_commit
from store.objects.protocol import ObjectStore
from store.plan import read_segments
from store.run_format import Commit, Outcome

_READERS = 16
_AHEAD = 256


@dataclass(frozen=True, slots=True)
class UnitTally:
    """One commit in numbers."""

    unit: int
    first_prompt: int
    stored: int
    failed: int
    skipped: int
    bytes: int
    quarantined: bool
    reasons: dict[int, str] = field(default_factory=dict)
    """Prompt number in the run -> why it is not stored."""

    @classmethod
    def of(cls, commit: Commit) -> UnitTally:
        """Count what a commit says."""
        outcomes = commit.prompts.outcome
        stored = outcomes.count(Outcome.STORED)
        reasons = {int(place): reason for place, reason in commit.prompts.reasons.items()}
        return cls(
            unit=commit.unit,
            first_prompt=commit.first_prompt,
            stored=stored,
            failed=outcomes.count(Outcome.FAILED),
            skipped=outcomes.count(Outcome.SKIPPED),
            bytes=sum(record.bytes for record in commit.objects),
            quarantined=stored == 0 and any(r.startswith(QUARANTINED) for r in reasons.values()),
            reasons={commit.first_prompt + place: reason for place, reason in reasons.items()},
        )


@dataclass(slots=True)
class RunStatus:
    """The whole run in numbers."""

    units_planned: int = 0
    units_committed: int = 0
    units_quarantined: int = 0
    prompts_planned: int = 0
    prompts_stored: int = 0
    prompts_failed: int = 0
    prompts_skipped: int = 0
    bytes: int = 0

    @property
    def complete(self) -> bool:
        """Whether every unit has its commit."""
        return self.units_committed + self.units_quarantined == self.units_planned

    def add(self, tally: UnitTally) -> None:
        """Count one unit's commit."""
        self.units_quarantined += tally.quarantined
        self.units_committed += not tally.quarantined
        self.prompts_stored += tally.stored
        self.prompts_failed += tally.failed
        self.prompts_skipped += tally.skipped
        self.bytes += tally.bytes

    def as_json(self) -> dict[str, Any]:
        """Return the public shape of `attnstore status --json`."""
        return {
            "units": {
                "planned": self.units_planned,
                "committed": self.units_committed,
                "quarantined": self.units_quarantined,
            },
            "prompts": {
                "planned": self.prompts_planned,
                "stored": self.prompts_stored,
                "failed": self.prompts_failed,
                "skipped": self.prompts_skipped,
            },
            "bytes": self.bytes,
        }


def read_status(objects: ObjectStore) -> RunStatus:
    """Count a run's units, prompts and bytes. Raises `DamagedObject` for a damaged commit."""
    segments = read_segments(objects)
    status = RunStatus(
        units_planned=sum(segment.num_units for segment in segments),
        prompts_planned=sum(segment.num_prompts for segment in segments),
    )
    for tally in unit_tallies(objects):
        status.add(tally)
    return status


def unit_tallies(objects: ObjectStore) -> Iterator[UnitTally]:
    """Yield every committed unit's numbers in order; a few hundred commits are read at a time."""
    names = list(committed_units(objects).values())
    with ThreadPoolExecutor(_READERS, thread_name_prefix="status") as pool:
        for start in range(0, len(names), _AHEAD):
            part = names[start : start + _AHEAD]
            yield from pool.map(lambda name: UnitTally.of(read_commit(objects, name)), part)
