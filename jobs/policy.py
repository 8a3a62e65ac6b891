"""What happens when something happens: the failure policy, one table, tested row by row.

Pure: it names actions and takes none. `jobs.dispatch` obeys. Two ideas carry it. Only failures that
the unit itself may have caused are charged to it; and a unit under suspicion runs alone, so that
the next failure has exactly one cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from capture.settings import UnitStatus


class Event(StrEnum):
    """What can befall an attempt, a worker, or the run."""

    COMMITTED = "committed"
    SUPERSEDED = "superseded"
    UNIT_FAILED = "unit failed"
    ENGINE_DIED = "engine died"
    DEADLINE = "deadline passed"
    NODE_LOST = "node lost"
    PREEMPTED = "preempted"
    STORE_FAILED = "store failed"
    STORE_REFUSES = "store refuses the unit"
    """It failed under the unit again and again, and each time took something else just then."""
    START_FAILED = "start failed"
    START_DEADLINE = "start deadline passed"
    SIGTERM = "asked to stop"
    OTHER_DRIVER = "another driver took over"
    QUOTA = "quota reached"
    SAME_ERROR = "same error everywhere"
    STORE_GONE = "store failing for too long"
    NO_WORKERS = "no worker would start"
    NO_ROOM = "no room for the workers"
    CLUSTER_GONE = "no node of the cluster is left"
    HOPELESS = "a unit fails even with all its prompts masked"


class ForUnit(StrEnum):
    """What becomes of the units concerned."""

    NOTHING = "nothing"
    DONE = "done"
    REQUEUE = "requeue"
    """Back to the front of the queue, uncharged."""
    CHARGE = "charge"
    """One more failure; see `next_try`."""


class ForWorker(StrEnum):
    """What becomes of the worker concerned."""

    KEEP = "keep"
    REPLACE = "replace"
    """It is gone, or is killed; another takes its place after a pause that doubles."""


class ForRun(StrEnum):
    """What becomes of the run."""

    GO_ON = "go on"
    BACK_OFF = "back off"
    """No new unit for a while; the pause doubles until something is committed."""
    DRAIN = "drain"
    """No new unit; what is in flight may finish; then the exit code."""
    STOP = "stop"
    """Kill the workers at once."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    unit: ForUnit
    worker: ForWorker
    run: ForRun
    exit_code: int | None = None
    """The exit code where this ends the run."""


_U, _W, _R = ForUnit, ForWorker, ForRun

RULES: Final = MappingProxyType(
    {
        Event.COMMITTED: Rule(_U.DONE, _W.KEEP, _R.GO_ON),
        Event.SUPERSEDED: Rule(_U.DONE, _W.KEEP, _R.GO_ON),
        Event.UNIT_FAILED: Rule(_U.CHARGE, _W.KEEP, _R.GO_ON),
        Event.ENGINE_DIED: Rule(_U.CHARGE, _W.REPLACE, _R.GO_ON),
        Event.DEADLINE: Rule(_U.CHARGE, _W.REPLACE, _R.GO_ON),
        Event.NODE_LOST: Rule(_U.REQUEUE, _W.REPLACE, _R.GO_ON),
        Event.PREEMPTED: Rule(_U.REQUEUE, _W.REPLACE, _R.GO_ON),
        Event.STORE_FAILED: Rule(_U.REQUEUE, _W.KEEP, _R.BACK_OFF),
        Event.STORE_REFUSES: Rule(_U.CHARGE, _W.KEEP, _R.BACK_OFF),
        Event.START_FAILED: Rule(_U.NOTHING, _W.REPLACE, _R.GO_ON),
        Event.START_DEADLINE: Rule(_U.NOTHING, _W.REPLACE, _R.GO_ON),
        Event.SIGTERM: Rule(_U.NOTHING, _W.KEEP, _R.DRAIN, 75),
        Event.OTHER_DRIVER: Rule(_U.NOTHING, _W.KEEP, _R.DRAIN, 75),
        Event.QUOTA: Rule(_U.NOTHING, _W.KEEP, _R.DRAIN, 2),
        Event.SAME_ERROR: Rule(_U.NOTHING, _W.KEEP, _R.STOP, 2),
        Event.STORE_GONE: Rule(_U.NOTHING, _W.KEEP, _R.STOP, 75),
        Event.NO_WORKERS: Rule(_U.NOTHING, _W.KEEP, _R.STOP, 2),
        Event.NO_ROOM: Rule(_U.NOTHING, _W.KEEP, _R.STOP, 75),
        Event.CLUSTER_GONE: Rule(_U.NOTHING, _W.KEEP, _R.STOP, 75),
        Event.HOPELESS: Rule(_U.NOTHING, _W.KEEP, _R.STOP, 2),
    }
)


class Try(StrEnum):
    """How a unit is tried."""

    TOGETHER = "together"
    """With other units in the same engine: the normal case."""
    ALONE = "alone"
    """As the only unit in its engine: the next failure is its own."""
    ONE_BY_ONE = "one by one"
    """Alone and prompt by prompt: the next failure is one prompt's own."""


MAX_SOLO_DEATHS: Final = 2
"""A prompt that ran quite alone and took the engine down so often is quarantined. Not at the first
time: a kill from outside would otherwise cost an innocent prompt its place."""

MAX_BLIND_FAILURES: Final = 3
"""A unit that failed so often one by one without any prompt to blame is given up whole."""

MAX_STORE_FAILURES: Final = 5
"""A unit that the store failed under so often, though it took another object each time right after,
is charged from then on: what is wrong is not the store as a whole."""

SAME_ERROR_UNITS: Final = 3
"""So many different units failing alike before anything was ever committed stop the run; of two
units it takes `SAME_ERROR_FAILURES` failures, since each is tried again before a third one is."""

SAME_ERROR_FAILURES: Final = 4

SAME_START_ERRORS: Final = 3
"""So many starts in a row failing before any worker ever started stop the run."""


def next_try(charges: int, max_attempts: int) -> Try:
    """Return how a unit with so many charged failures is tried next."""
    if charges == 0:
        return Try.TOGETHER
    return Try.ALONE if charges < max_attempts else Try.ONE_BY_ONE


RESULTS: Final = MappingProxyType(
    {
        (UnitStatus.COMMITTED, False): Event.COMMITTED,
        (UnitStatus.SUPERSEDED, False): Event.SUPERSEDED,
        (UnitStatus.FAILED, False): Event.UNIT_FAILED,
        (UnitStatus.FAILED, True): Event.STORE_FAILED,
    }
)
"""What an attempt's result means: how it ended, and whether it was the store that failed. Who saw
the error says so by its type; its text, which may quote anything, is for people."""


def signature(error: str) -> str:
    """Return an error's last line without its numbers and addresses, to tell equal ones."""
    lines = [line for line in error.strip().splitlines() if line.strip()]
    return re.sub(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", "#", lines[-1].strip()) if lines else ""


@dataclass(slots=True)
class SameErrorGuard:
    """Notices that everything fails alike before anything has worked; then more tries are waste."""

    worked: bool = False
    failed_units: dict[int, str] = field(default_factory=dict)
    failures: int = 0
    failed_starts: int = 0

    def success(self) -> None:
        """A unit was committed."""
        self.worked = True
        self.failed_units.clear()
        self.failures = 0

    def started(self) -> None:
        """A worker started."""
        self.failed_starts = 0

    def unit_failed(self, unit: int, error: str) -> bool:
        """Note a failure that is surely the unit's own; return whether the run should stop."""
        if self.worked:
            return False
        self.failed_units[unit] = signature(error)
        self.failures += 1
        units = len(self.failed_units)
        enough = units >= SAME_ERROR_UNITS or (units > 1 and self.failures >= SAME_ERROR_FAILURES)
        return enough and len(set(self.failed_units.values())) == 1

    def start_failed(self) -> bool:
        """Note a failed start; return whether the run should stop."""
        self.failed_starts += 1
        return self.failed_starts >= SAME_START_ERRORS
