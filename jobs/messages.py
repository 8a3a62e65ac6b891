"""What driver, pool and workers say to each other: plain values that cross process boundaries.

Knows no Ray, so that dispatching can be tested and simulated without a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from capture.settings import CaptureSettings, EngineFacts, EngineSettings, StoreLocation, UnitResult
from jobs.config import ModelConfig

WorkerId = int


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything a worker needs to start; the same for all workers of a run."""

    run_id: str
    location: StoreLocation
    engine: EngineSettings
    capture: CaptureSettings
    units_in_flight: int = 2
    self_check: bool = False
    """Try the engine on a few of the run's prompts before it takes orders."""
    model: ModelConfig | None = None
    """Where the model lies; its files must be those that `frozen` tells of."""
    frozen: Mapping[str, Any] = field(default_factory=dict)
    """The run's frozen fields."""


@dataclass(frozen=True, slots=True)
class UnitOrder:
    """One attempt at one unit. The worker reads the prompts from the stored plan itself, so that
    an order stays small however many tokens it means."""

    unit: int
    attempt: str
    segment: int
    first_prompt: int
    num_prompts: int
    num_tokens: int
    masked: tuple[tuple[int, str], ...] = ()
    """Places in the unit that must not run, and why: prompts that killed engines before."""
    batch_prompts: int = 0
    """As in `UnitTask`: N > 0 runs the prompts N at a time, in order."""
    repair: int = 0
    """The number under which a unit that has a damaged commit is committed again."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a started worker says of itself."""

    node: str
    pid: int
    engine: EngineFacts
    start_seconds: float


@dataclass(frozen=True, slots=True)
class WorkReport:
    """What came of one call of `work`."""

    results: tuple[UnitResult, ...] = ()
    finished: dict[int, int] = field(default_factory=dict)
    """Unit -> prompts done with, for units that run in batches."""
    dead: str | None = None
    """Traceback of the error after which the engine can do no more."""
    dead_rank: int | None = None
    """The rank that it comes from, where it is one rank's."""
    store_works: bool = False
    """Where the store failed under a result: whether it took another object just then."""


class LossCause(StrEnum):
    """Why a worker is gone."""

    DIED = "died"
    NODE_LOST = "node lost"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class Placed:
    """The cluster has room for the worker; its engine begins to start."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Started:
    """A worker's engine runs."""

    worker: WorkerId
    facts: WorkerFacts


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker could not start its engine; it is gone."""

    worker: WorkerId
    error: str
    cause: LossCause = LossCause.DIED


@dataclass(frozen=True, slots=True)
class Reported:
    """One call of `work` came back."""

    worker: WorkerId
    report: WorkReport


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that had started is gone."""

    worker: WorkerId
    cause: LossCause
    error: str


PoolEvent = Placed | Started | StartFailed | Reported | Lost
