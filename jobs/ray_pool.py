"""The pool of workers as Ray actors: starts Ray and actors, and turns what Ray says into events.

Actors are never restarted by Ray (`max_restarts=0`): a new actor may go to another node, its engine
start is one more event with its own deadline and its own place in the policy, and no call is ever
repeated behind the driver's back.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from jobs.config import RunConfig
from jobs.errors import ConfigError, RunInterrupted
from jobs.messages import (
    LossCause,
    Lost,
    Placed,
    PoolEvent,
    Reported,
    Started,
    StartFailed,
    UnitOrder,
    WorkerId,
    WorkerSpec,
)
from jobs.worker import CaptureWorker

_OBJECT_STORE_BYTES = 100 << 20
_ERROR_CHARACTERS = 8_000
_PROBE_SECONDS = 3.0


class _Call(StrEnum):
    PLACE = "place"
    START = "start"
    WORK = "work"


@dataclass(slots=True)
class _Actor:
    handle: Any
    node: str = ""
    started: bool = False


def connect(config: RunConfig, *, verbose: bool = False) -> None:
    """Join the cluster at `workers.address`, or start Ray on this machine for this run alone.

    Inside a submitted job (`RAY_ADDRESS` is set) the cluster that runs the job is joined.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = config.workers.address or os.environ.get("RAY_ADDRESS")
    common = {"log_to_driver": verbose, "logging_level": logging.ERROR, "namespace": "attnstore"}
    if address:
        try:
            ray.init(address=address, **common)
        except (ConnectionError, RayError, ValueError) as error:
            raise ConfigError(f"no Ray cluster at {address!r}: {error}") from error
        return
    needed = config.workers.highest * (config.workers.num_cpus or 1.0)
    try:
        ray.init(
            address="local",  # Never somebody else's Ray that happens to run on this machine.
            num_cpus=max(os.cpu_count() or 1, int(needed + 0.999)),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            **common,
        )
    except Exception as error:
        # Policy: a Ray that does not start (bare exceptions of many kinds) interrupts the run. It
        # gives up after half a minute, which a machine with too much to do may need.
        disconnect()
        raise RunInterrupted(
            f"Ray did not start on this machine: {error}\nrun the same command again"
        ) from error


def disconnect() -> None:
    """Leave the cluster; ends a Ray that `connect` started."""
    ray.shutdown()


class RayPool:
    """Workers of one run; see `jobs.pool.WorkerPool`."""

    def __init__(
        self, config: RunConfig, spec: WorkerSpec, worker: type[CaptureWorker] = CaptureWorker
    ) -> None:
        """`worker` is the actor's class; another one injects faults in tests."""
        self._spec = spec
        gpus = config.workers.num_gpus
        if gpus is None:
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            gpus = float(config.engine.tensor_parallel_size) if has_gpus else 0.0
        self._actor_class = ray.remote(worker).options(
            num_cpus=1.0 if config.workers.num_cpus is None else config.workers.num_cpus,
            num_gpus=gpus,
            max_concurrency=1,
            max_restarts=0,
            max_task_retries=0,
        )
        self._actors: dict[WorkerId, _Actor] = {}
        self._calls: dict[Any, tuple[WorkerId, _Call]] = {}
        self._next = 0

    def spawn(self) -> WorkerId:
        """Ask Ray for one more actor; its engine starts as soon as the actor has its place."""
        number, self._next = self._next, self._next + 1
        handle = self._actor_class.remote(self._spec)
        self._actors[number] = _Actor(handle)
        self._calls[handle.place.remote()] = (number, _Call.PLACE)
        self._calls[handle.start.remote()] = (number, _Call.START)
        return number

    def send(self, worker: WorkerId, order: UnitOrder | None) -> None:
        """Queue one call of `work` at the actor."""
        handle = self._actors[worker].handle
        self._calls[handle.work.remote(order)] = (worker, _Call.WORK)

    def kill(self, worker: WorkerId) -> None:
        """Kill the actor's process; Ray kills its process group, so its ranks go with it."""
        actor = self._actors.pop(worker, None)
        if actor is None:
            return
        self._calls = {ref: call for ref, call in self._calls.items() if call[0] != worker}
        ray.kill(actor.handle, no_restart=True)

    def poll(self, timeout: float) -> list[PoolEvent]:
        """Return what has come back, waiting up to `timeout` seconds for the first."""
        if not self._calls:
            time.sleep(timeout)
            return []
        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout)
        if ready:
            ready, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        events = [self._event(ref) for ref in ready]
        return [event for event in events if event is not None]

    def has_nodes(self) -> bool:
        """Return whether any node of the cluster is left."""
        return any(node["Alive"] for node in ray.nodes())

    def draining_nodes(self) -> frozenset[str]:
        """Return the nodes that were told to leave."""
        return frozenset(ray._private.state.state.get_draining_nodes())

    def close(self) -> None:
        """Kill all workers."""
        for worker in list(self._actors):
            self.kill(worker)

    def _event(self, ref: Any) -> PoolEvent | None:
        call = self._calls.pop(ref, None)
        if call is None:
            return None
        worker, kind = call
        actor = self._actors[worker]
        try:
            value = ray.get(ref, timeout=60)
        except RayTaskError as error:
            return self._gone(worker, LossCause.DIED, str(error))
        except (RayError, GetTimeoutError) as error:
            return self._gone(worker, self._cause(actor, error), str(error))
        if kind is _Call.PLACE:
            actor.node = value
            return Placed(worker)
        if kind is _Call.START:
            actor.started = True
            return Started(worker, value)
        return Reported(worker, value)

    def _gone(self, worker: WorkerId, cause: LossCause, error: str) -> PoolEvent:
        started = self._actors[worker].started
        self.kill(worker)
        text = error[-_ERROR_CHARACTERS:]
        return Lost(worker, cause, text) if started else StartFailed(worker, text, cause)

    def _cause(self, actor: _Actor, error: Exception) -> LossCause:
        if isinstance(error, ActorDiedError) and error.preempted:
            return LossCause.PREEMPTED
        if actor.node and not _node_answers(actor.node):
            return LossCause.NODE_LOST
        return LossCause.DIED


def _node_answers(node_id: str) -> bool:
    """Whether a node is there. Ray's own table learns of a dead node only seconds after the actors'
    deaths are told, so the node's raylet is asked as well."""
    node = next((one for one in ray.nodes() if one["NodeID"] == node_id), None)
    if node is None or not node["Alive"]:
        return False
    try:
        place = (node["NodeManagerAddress"], node["NodeManagerPort"])
        socket.create_connection(place, timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True
