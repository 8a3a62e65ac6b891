"""What `run --repair` makes of what `verify` found: capture, delete what is derived, or say what.

Units are captured again. Snapshots, self-checks and owners are derived or advisory: a damaged one
is deleted, and made again where something makes it. A W_O is deleted too, and stored anew by the
engine that captures what is damaged, or by one that is started for nothing else. What nothing makes
again is named with what to do, and stops nothing; only damage to what all reading rests on
(`run.json`, `model.json`, the plan) does.
"""

from __future__ import annotations

from dataclasses import dataclass

from jobs.event_log import EventLog
from jobs.prepare import PreparedRun
from store import keys
from store.errors import DamagedObject
from store.model_check import read_model
from store.objects.protocol import ObjectStore
from store.snapshot import LATEST
from store.summaries import SUMMARIES
from store.verify import verify_run
from store.verify_beside import due_weights
from store.verify_report import Problem
from store.weights import WEIGHTS

_DERIVED = (keys.SNAPSHOTS, keys.CHECKS, keys.OWNERS)
_LEFT = {
    SUMMARIES: "save the summary again under its name, or delete it; nothing else of the run is "
    "affected",
    WEIGHTS: "delete it: it is no part of the run",
}


@dataclass(frozen=True, slots=True)
class Damage:
    """What a repair has to do, now that what is derived was deleted."""

    units: tuple[int, ...] = ()
    """To be captured again."""
    snapshot: bool = False
    """Whether a snapshot is to be written anew."""
    weights: tuple[str, ...] = ()
    """The W_O that an engine is to store anew when it starts."""

    def __bool__(self) -> bool:
        return bool(self.units) or self.snapshot or bool(self.weights)


def find_damage(
    objects: ObjectStore, prepared: PreparedRun, *, deep: bool, log: EventLog
) -> Damage:
    """Verify a run, delete what is damaged and derived, and return what is left to do.

    Raises `DamagedObject`, before it deletes anything, where all else rests on what is damaged.
    """
    report = verify_run(objects, deep=deep)
    for problem in report.problems:
        log("damaged", name=problem.name, unit=problem.unit, problem=problem.message)
    beside = [problem for problem in report.problems if problem.unit is None]
    for problem in beside:
        if not problem.name.startswith((*_DERIVED, *_LEFT)):
            raise DamagedObject(
                f"{problem.name} cannot be repaired by capturing: {problem.message}. Restore it "
                "from a copy of the run"
            )
    model = read_model(objects, prepared.manifest.run_id)
    due = set() if model is None else due_weights(prepared.manifest.config, model)
    for problem in beside:
        if problem.name.startswith(_DERIVED) or problem.name in due:
            _delete(objects, problem, log)
        else:
            advice = next(text for prefix, text in _LEFT.items() if problem.name.startswith(prefix))
            log("not repaired", name=problem.name, problem=problem.message, detail=advice)
    weights = {problem.name for problem in beside if problem.name in due}
    snapshot = any(problem.name.startswith(keys.SNAPSHOTS) for problem in beside)
    if snapshot:
        objects.delete(LATEST)  # It may name one that was deleted, and the next may sort before.
    return Damage(tuple(sorted(report.damaged_units)), snapshot, tuple(sorted(weights)))


def _delete(objects: ObjectStore, problem: Problem, log: EventLog) -> None:
    names = [problem.name]
    if problem.name.endswith("/"):
        # A snapshot is there by its manifest, which so goes first.
        found = [info.name for info in objects.list(problem.name)]
        names = sorted(found, key=lambda name: not name.endswith("manifest.json"))
    for name in names:
        objects.delete(name)
    log("deleted", name=problem.name, detail="it is derived, and made again where it is needed")
