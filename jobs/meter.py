"""Takes snapshots of a dispatcher for progress and metrics."""

from __future__ import annotations

import time

from jobs.dispatch import Dispatcher
from jobs.fleet import Phase
from jobs.progress import Snapshot
from jobs.schedule import Schedule


class Meter:
    """Takes snapshots of a dispatcher."""

    def __init__(
        self, dispatcher: Dispatcher, schedule: Schedule, *, units_planned: int, tokens: int
    ) -> None:
        self._dispatcher = dispatcher
        self._schedule = schedule
        self._units_planned = units_planned
        self._tokens = tokens
        self._started = time.monotonic()

    def snapshot(self) -> Snapshot:
        workers = self._dispatcher.workers.values()
        counters = self._dispatcher.counters
        orders = [order for worker in workers for order in worker.orders.values()]
        bytes_per_token = max(
            (w.facts.engine.bytes_per_token for w in workers if w.facts is not None), default=0
        )
        return Snapshot(
            units_done=self._units_planned - self._schedule.num_missing,
            units_planned=self._units_planned,
            prompts_stored=counters.stored,
            prompts_failed=counters.failed,
            tokens=counters.tokens,
            bytes=counters.bytes,
            tokens_planned=self._tokens,
            seconds=time.monotonic() - self._started,
            workers_ready=sum(1 for worker in workers if worker.phase is Phase.READY),
            workers_asked=len(self._dispatcher.workers),
            units_in_flight=len(orders),
            bytes_in_flight=sum(order.num_tokens for order in orders) * bytes_per_token,
            retries=counters.retries,
            workers_lost=counters.workers_lost,
            stalls=dict(counters.stalls),
        )
