"""What a run holds by now, from storage alone: works with no cluster running and no config at hand.

Units and prompts are counted from the commits, never guessed. A unit counts as quarantined, not as
committed, when its commit records that none of its prompts survived being run; one whose commit
cannot be read counts as damaged alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jobs.bound import Bound, find_bound
from jobs.prepare import read_manifest
from jobs.schedule import QUARANTINED
from store.checks import SelfCheckFigures, read_checks
from store.commit import read_commit_leniently
from store.committed_units import CommittedUnits
from store.errors import RunError, StoreError
from store.objects.protocol import ObjectStore
from store.plan import read_segments
from store.planned_units import require_planned
from store.snapshot import find_committed

_READERS = 16
_TIMED_UNITS = 16
"""How many commits are read for what bounds the run."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The whole run in numbers."""

    units_planned: int
    units_committed: int
    units_quarantined: int
    prompts_planned: int
    prompts_stored: int
    prompts_failed: int
    prompts_skipped: int
    bytes: int
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Units whose commits cannot be read, and why."""
    bound: Bound | None = None
    """What the units committed last waited for; None where their commits do not tell."""
    checks: tuple[SelfCheckFigures, ...] = ()
    """What the run's self-checks measured, oldest first."""
    layers_without_attention: dict[str, list[int]] = field(default_factory=dict)
    """Kind -> layers of the model of which nothing is captured; empty where all have attention."""

    @property
    def complete(self) -> bool:
        """Whether there is a plan and every unit of it has its commit."""
        done = self.units_committed + self.units_quarantined
        return 0 < self.units_planned == done

    def damage(self) -> str | None:
        """Return what to say of the damaged units, None where there are none."""
        if not self.damaged:
            return None
        unit, why = next(iter(self.damaged.items()))
        return (
            f"{len(self.damaged)} of {self.units_planned} units have commits that cannot be read; "
            f"unit {unit}: {why}; `attnstore run CONFIG --repair` captures them again"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the public shape of `attnstore status --json`."""
        bare = self.layers_without_attention
        return {
            "units": {
                "planned": self.units_planned,
                "committed": self.units_committed,
                "quarantined": self.units_quarantined,
                **({} if not self.damaged else {"damaged": len(self.damaged)}),
            },
            "prompts": {
                "planned": self.prompts_planned,
                "stored": self.prompts_stored,
                "failed": self.prompts_failed,
                "skipped": self.prompts_skipped,
            },
            "bytes": self.bytes,
            **({} if self.bound is None else {"bound": self.bound.as_json()}),
            **({} if not self.checks else {"checks": [one.figures() for one in self.checks]}),
            **({} if not bare else {"layers_without_attention": bare}),
        }


def read_status(objects: ObjectStore) -> RunStatus:
    """Count a run's units, prompts and bytes. Raises `RunNotFound`, and `DamagedObject` where units
    are committed that no plan segment has.

    Costs the newest snapshot, the commits after it, 16 commits for their timings, and `checks/`.
    """
    manifest = read_manifest(objects)
    run_id = manifest.run_id
    committed = find_committed(objects, run_id)
    # After the commits: a segment is there before any of its units is committed.
    segments = read_segments(objects)
    require_planned(committed, segments)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="status") as pool:
        committed.load(objects, run_id, pool.map)
        names = map(committed.key, committed.units()[-_TIMED_UNITS:].tolist())
        timings = list(pool.map(partial(_timings, objects), names))
    rows = committed.table()
    quarantined = _quarantined(committed, rows)
    return RunStatus(
        units_planned=sum(segment.num_units for segment in segments),
        units_committed=len(rows["unit"]) - quarantined,
        units_quarantined=quarantined,
        prompts_planned=sum(segment.num_prompts for segment in segments),
        prompts_stored=int(rows["stored"].sum()),
        prompts_failed=int(rows["failed"].sum()),
        prompts_skipped=int(rows["skipped"].sum()),
        bytes=int(rows["bytes"].sum()),
        damaged=dict(sorted(committed.damaged.items())),
        bound=find_bound(_summed(timings)),
        checks=_checks(objects, run_id),
        layers_without_attention=manifest.layers_without_attention,
    )


def _timings(objects: ObjectStore, commit_key: str | None) -> dict[str, float]:
    """Return a commit's seconds by stage; one that cannot be read tells nothing here."""
    assert commit_key is not None, "it is among the committed"
    try:
        return read_commit_leniently(objects, commit_key).timings
    except (RunError, StoreError):
        return {}


def _checks(objects: ObjectStore, run_id: str) -> tuple[SelfCheckFigures, ...]:
    """Return the self-checks' figures; they are advisory, and `verify` is who reports damage."""
    try:
        return read_checks(objects, run_id)
    except (RunError, StoreError):
        return ()


def _summed(timings: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in timings:
        for stage, seconds in one.items():
            total[stage] = total.get(stage, 0.0) + seconds
    return total


def _quarantined(committed: CommittedUnits, rows: dict[str, Any]) -> int:
    """Units of which nothing is stored and at least one prompt failed only once it ran."""
    empty = rows["stored"] == 0
    first, count = rows["first_prompt"][empty], rows["num_prompts"][empty]
    if not len(first):
        return 0
    bad = np.array(
        [e.prompt for e in committed.all_exceptions() if e.reason.startswith(QUARANTINED)],
        dtype=np.int64,
    )
    return int((np.searchsorted(bad, first) < np.searchsorted(bad, first + count)).sum())
