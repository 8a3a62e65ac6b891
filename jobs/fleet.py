"""What a dispatcher knows: limits, workers, counters, and how the run ends. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from jobs.messages import UnitOrder, WorkerFacts


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """The config's numbers that dispatching obeys."""

    lowest: int = 1
    highest: int = 1
    units_in_flight: int = 2
    unit_deadline_seconds: float = 1800.0
    start_deadline_seconds: float = 1800.0
    store_patience_seconds: float = 900.0
    drain_seconds: float = 30.0
    duplicate_stragglers: bool = False


class Phase(StrEnum):
    """Where a worker is in its life."""

    ASKED = "asked for"
    STARTING = "starting"
    READY = "ready"


@dataclass(slots=True)
class Worker:
    """What the dispatcher knows of one worker."""

    since: float
    phase: Phase = Phase.ASKED
    facts: WorkerFacts | None = None
    orders: dict[int, UnitOrder] = field(default_factory=dict)
    calls: int = 0
    reserved: bool = False
    draining: bool = False
    finished: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run ends, once it does."""

    exit_code: int
    message: str


@dataclass(slots=True)
class Counters:
    """What happened so far, for progress and metrics."""

    committed: int = 0
    superseded: int = 0
    stored: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0
    retries: int = 0
    workers_lost: int = 0
    events: dict[str, int] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)
