"""A pool whose workers live in this process: the driver's tests without Ray's seconds.

For tests in which no process dies; those that kill run on real Ray.
"""

from __future__ import annotations

import time
import traceback
from collections import deque

from jobs import messages
from jobs.config import RunConfig
from jobs.worker import CaptureWorker


class LocalPool:
    """Runs one call of each worker at every poll."""

    def __init__(
        self, config: RunConfig, spec: messages.WorkerSpec, worker: type[CaptureWorker]
    ) -> None:
        del config
        self._make = lambda: worker(spec)
        self._workers: dict[messages.WorkerId, CaptureWorker] = {}
        self._calls: dict[messages.WorkerId, deque[messages.UnitOrder | None]] = {}
        self._fresh: list[messages.WorkerId] = []
        self._spawned = 0

    def spawn(self) -> messages.WorkerId:
        number, self._spawned = self._spawned, self._spawned + 1
        self._fresh.append(number)
        return number

    def send(self, worker: messages.WorkerId, order: messages.UnitOrder | None) -> None:
        self._calls[worker].append(order)

    def kill(self, worker: messages.WorkerId) -> None:
        self._workers.pop(worker, None)
        self._calls.pop(worker, None)

    def poll(self, timeout: float) -> list[messages.PoolEvent]:
        events: list[messages.PoolEvent] = []
        for number in self._fresh:
            events.append(messages.Placed(number))
            made = self._make()
            made.place = lambda: "here"  # type: ignore[method-assign]
            try:
                events.append(messages.Started(number, made.start()))
            except Exception:  # noqa: BLE001 - whatever it was, the worker did not start
                events.append(messages.StartFailed(number, traceback.format_exc()))
                continue
            self._workers[number], self._calls[number] = made, deque()
        self._fresh.clear()
        for number, worker in self._workers.items():
            if self._calls[number]:
                events.append(messages.Reported(number, worker.work(self._calls[number].popleft())))
        if not events:
            time.sleep(min(timeout, 0.02))
        return events

    def has_nodes(self) -> bool:
        return True

    def draining_nodes(self) -> frozenset[str]:
        return frozenset()

    def close(self) -> None:
        self._workers.clear()
