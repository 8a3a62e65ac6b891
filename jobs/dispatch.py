"""Which worker gets what, and what follows from what comes back: the driver's mind, no more.

Takes a pool's events and the clock, obeys `jobs.policy`, and gives the pool commands. Never touches
Ray, stores or tensors, so that a simulation of 10^6 units and every fault can drive it as it is.

A worker holds up to `units_in_flight` units in its engine and one more order waiting, so that the
engine never waits for the driver. A unit under suspicion goes to a worker that is kept free for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from capture.settings import UnitResult
from jobs.fleet import Counters, DispatchLimits, Ending, Phase, Worker
from jobs.messages import (
    LossCause,
    Lost,
    Placed,
    PoolEvent,
    Reported,
    Started,
    StartFailed,
    UnitOrder,
    WorkerFacts,
    WorkerId,
    WorkReport,
)
from jobs.policy import (
    RESULTS,
    RULES,
    Event,
    ForRun,
    ForUnit,
    ForWorker,
    SameErrorGuard,
)
from jobs.pool import WorkerPool
from jobs.schedule import Schedule

MAX_PAUSE_SECONDS = 60.0
CALLS_PER_WORKER = 2


class Dispatcher:
    """Drives a pool until every unit is done or the policy ends the run."""

    def __init__(
        self,
        schedule: Schedule,
        pool: WorkerPool,
        limits: DispatchLimits,
        log: Callable[..., None],
    ) -> None:
        """`log(event, **fields)` is called for everything an operator may want to know."""
        self._schedule = schedule
        self._pool = pool
        self._limits = limits
        self._log = log
        self._guard = SameErrorGuard()
        self.workers: dict[WorkerId, Worker] = {}
        self.counters = Counters()
        self.ending: Ending | None = None
        self._drain_until: float | None = None
        self._pause_seconds = 0.0
        self._paused_until = 0.0
        self._store_failing_since: float | None = None
        self._store_error = ""
        self._spawn_pause = 0.0
        self._spawn_after = 0.0
        self._short_since: float | None = None
        self._on_facts: Callable[[WorkerFacts], None] = lambda _facts: None
        self._on_result: Callable[[UnitResult], None] = lambda _result: None

    def observe(
        self,
        on_facts: Callable[[WorkerFacts], None],
        on_result: Callable[[UnitResult], None],
    ) -> None:
        """Name who hears of each started engine and each result; what they raise ends the run."""
        self._on_facts, self._on_result = on_facts, on_result

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to do: all units done, or the run has ended and drained."""
        if self._schedule.num_missing == 0:
            return True
        if self.ending is None:
            return False
        return not any(worker.orders for worker in self.workers.values())

    def step(self, now: float, timeout: float) -> None:
        """Assign what can be assigned, wait up to `timeout` for events, and act on them."""
        self._grow(now)
        self._assign(now)
        for event in self._pool.poll(timeout):
            self._handle(event, now)
        self._check_deadlines(now)

    def end(self, event: Event, message: str, now: float) -> None:
        """Begin the end of the run for a reason of the table's that ends runs."""
        rule = RULES[event]
        assert rule.exit_code is not None
        self._count(event)
        if self.ending is None:
            self.ending = Ending(rule.exit_code, message)
            self._log("ending", reason=str(event), message=message, exit_code=rule.exit_code)
        until = now + (self._limits.drain_seconds if rule.run is ForRun.DRAIN else 0.0)
        self._drain_until = min(until, self._drain_until or until)
        if rule.run is ForRun.STOP:
            self._drop_all("the run stops")

    def drain_nodes(self, nodes: frozenset[str]) -> None:
        """No new unit for workers on these nodes; they were told to leave."""
        for number, worker in self.workers.items():
            leaving = worker.facts is not None and worker.facts.node in nodes
            if leaving and not worker.draining:
                worker.draining = True
                self._log("draining", worker=number, node=worker.facts and worker.facts.node)

    # ---- growing and shrinking ---------------------------------------------------------------

    def _grow(self, now: float) -> None:
        if self.ending is not None or now < self._spawn_after:
            return
        wanted = min(self._limits.highest, self._schedule.num_missing)
        staying = sum(1 for worker in self.workers.values() if not worker.draining)
        for _ in range(wanted - staying):
            number = self._pool.spawn()
            self.workers[number] = Worker(since=now)
            self._log("worker asked for", worker=number)

    def _release_idle(self) -> None:
        """Give back workers that nothing is left for, and those of nodes told to leave."""
        for number, worker in list(self.workers.items()):
            if worker.draining and not worker.orders and worker.calls == 0:
                self._log("worker released", worker=number, why="its node leaves")
                self._forget(number)
        if self._schedule.has_fresh or self._schedule.has_alone:
            return
        idle = [
            number
            for number, worker in self.workers.items()
            if worker.phase is Phase.READY and not worker.orders and worker.calls == 0
        ]
        keep = max(self._limits.lowest, self._schedule.num_missing)
        for number in idle[: max(0, len(self.workers) - keep)]:
            self._log("worker released", worker=number)
            self._forget(number)

    # ---- assigning ---------------------------------------------------------------------------

    def _assign(self, now: float) -> None:
        if self.ending is None and now >= self._paused_until:
            self._reserve()
            # One each in turn, so that nobody holds two while another has none.
            while sum(self._give_one(n, worker, now) for n, worker in self.workers.items()):
                continue
            self._release_idle()
        for number, worker in self.workers.items():
            if worker.phase is Phase.READY and worker.orders and worker.calls == 0:
                self._send(number, worker, None, now)

    def _reserve(self) -> None:
        """Keep one worker free while units must run alone: the one with the least to finish."""
        ready = [w for w in self.workers.values() if w.phase is Phase.READY and not w.draining]
        reserved = [worker for worker in ready if worker.reserved]
        if not self._schedule.has_alone:
            for worker in reserved:
                worker.reserved = bool(worker.orders)
        elif not reserved and ready:
            min(ready, key=lambda worker: len(worker.orders)).reserved = True

    def _may_take(self, worker: Worker) -> bool:
        if worker.phase is not Phase.READY or worker.draining or worker.calls >= CALLS_PER_WORKER:
            return False
        if worker.reserved:
            return not worker.orders
        return len(worker.orders) <= self._limits.units_in_flight

    def _give_one(self, number: WorkerId, worker: Worker, now: float) -> bool:
        order = self._order_for(number, worker) if self._may_take(worker) else None
        if order is None:
            return False
        self._send(number, worker, order, now)
        return True

    def _order_for(self, number: WorkerId, worker: Worker) -> UnitOrder | None:
        if worker.reserved:
            return self._schedule.take_alone()
        order = self._schedule.take()
        if order is None and self._limits.duplicate_stragglers and not worker.orders:
            order = self._straggler(number)
        return order

    def _straggler(self, idle: WorkerId) -> UnitOrder | None:
        """The unit that one other worker alone has had the longest."""
        holders: dict[int, list[WorkerId]] = {}
        for number, worker in self.workers.items():
            for unit in worker.orders:
                if not self._schedule.is_done(unit):
                    holders.setdefault(unit, []).append(number)
        single = [
            (self.workers[held[0]].since, unit)
            for unit, held in holders.items()
            if len(held) == 1 and held[0] != idle and not self.workers[held[0]].reserved
        ]
        if not single:
            return None
        unit = min(single)[1]
        self._log("straggler doubled", unit=unit, worker=idle)
        return self._schedule.repeat(unit)

    def _send(self, number: WorkerId, worker: Worker, order: UnitOrder | None, now: float) -> None:
        if order is not None:
            if not worker.orders:
                worker.since = now
            worker.orders[order.unit] = order
            worker.finished.pop(order.unit, None)
            self._log("assigned", unit=order.unit, attempt=order.attempt, worker=number)
        worker.calls += 1
        self._pool.send(number, order)

    # ---- what comes back ---------------------------------------------------------------------

    def _handle(self, event: PoolEvent, now: float) -> None:
        worker = self.workers.get(event.worker)
        if worker is None:
            return
        if isinstance(event, Placed):
            worker.phase, worker.since = Phase.STARTING, now
        elif isinstance(event, Started):
            worker.phase, worker.since, worker.facts = Phase.READY, now, event.facts
            self._guard.started()
            self._log(
                "worker started",
                worker=event.worker,
                node=event.facts.node,
                pid=event.facts.pid,
                seconds=round(event.facts.start_seconds, 1),
            )
            self._on_facts(event.facts)
        elif isinstance(event, StartFailed):
            self._start_failed(event, now)
        elif isinstance(event, Reported):
            self._reported(event.worker, worker, event.report, now)
        elif isinstance(event, Lost):
            kinds = {
                LossCause.DIED: Event.ENGINE_DIED,
                LossCause.NODE_LOST: Event.NODE_LOST,
                LossCause.PREEMPTED: Event.PREEMPTED,
            }
            self._lost(event.worker, kinds[event.cause], event.error, now)

    def _start_failed(self, event: StartFailed, now: float) -> None:
        innocent = event.cause is not LossCause.DIED
        self._log("worker did not start", worker=event.worker, error=event.error)
        self._forget(event.worker)
        self._pause_spawning(now)
        self._count(Event.START_FAILED)
        if not innocent and self._guard.start_failed() and not self._any_ready:
            message = f"no worker would start; the last error:\n{event.error}"
            self.end(Event.NO_WORKERS, message, now)

    @property
    def _any_ready(self) -> bool:
        return any(worker.phase is Phase.READY for worker in self.workers.values())

    def _reported(self, number: WorkerId, worker: Worker, report: WorkReport, now: float) -> None:
        worker.calls -= 1
        advanced = any(
            report.finished.get(u, 0) > worker.finished.get(u, 0) for u in report.finished
        )
        worker.finished |= report.finished
        if report.results or advanced:
            worker.since = now
        for result in report.results:
            order = worker.orders.get(result.unit)
            if order is None or order.attempt != result.attempt:
                continue
            del worker.orders[result.unit]
            self._result(number, order, result, now, store_works=report.store_works)
        if report.dead is not None:
            self._lost(number, Event.ENGINE_DIED, report.dead, now, report.dead_rank)

    def _result(
        self,
        number: WorkerId,
        order: UnitOrder,
        result: UnitResult,
        now: float,
        *,
        store_works: bool,
    ) -> None:
        worker = self.workers[number]
        event = RESULTS[result.status, result.store_failed]
        if event is Event.STORE_FAILED and store_works and self._schedule.store_refuses(order.unit):
            event = Event.STORE_REFUSES
        self._count(event)
        error = result.error or ""
        rule = RULES[event]
        if rule.unit is ForUnit.DONE:
            self._done(result, event)
        elif rule.unit is ForUnit.REQUEUE:
            self._schedule.requeue(result.unit)
        else:
            # What the store refuses is the unit's, never known to be one prompt's.
            own = event is Event.STORE_REFUSES
            self._charge(order, error, None if own else self._suspect(worker, order), now)
        if rule.run is ForRun.BACK_OFF:
            self._back_off(error, now, store_works=store_works)
        self._log(
            str(event),
            unit=result.unit,
            attempt=result.attempt,
            worker=number,
            rank=result.rank,
            seconds=round(result.seconds, 2),
            tokens=result.tokens,
            bytes=result.bytes,
            error=result.error,
        )

    def _done(self, result: UnitResult, event: Event) -> None:
        first = not self._schedule.is_done(result.unit)
        self._schedule.done(result.unit)
        self._guard.success()
        self._pause_seconds = self._spawn_pause = 0.0
        self._store_failing_since = None
        counters = self.counters
        counters.superseded += event is Event.SUPERSEDED
        if event is Event.COMMITTED and first:
            counters.committed += 1
            counters.stored += result.stored
            counters.failed += result.failed
            counters.tokens += result.tokens
            counters.bytes += result.bytes
            for cause, seconds in result.timings.items():
                counters.stalls[cause] = counters.stalls.get(cause, 0.0) + seconds
        self._on_result(result)

    def _charge(
        self, order: UnitOrder, error: str, place: int | None, now: float, *, sure: bool = True
    ) -> None:
        unit = order.unit
        if self._schedule.is_done(unit):
            return
        self.counters.retries += 1
        self._schedule.charge(unit, error, place)
        if self._schedule.is_hopeless(unit):
            self.end(Event.HOPELESS, f"unit {unit} cannot even be given up:\n{error}", now)
        elif sure and self._guard.unit_failed(unit, error):
            message = f"every first unit fails the same way; the last error:\n{error}"
            self.end(Event.SAME_ERROR, message, now)

    def _suspect(self, worker: Worker, order: UnitOrder) -> int | None:
        """The place of the prompt that was alone in the engine, if one was."""
        if order.batch_prompts != 1:
            return None
        place = worker.finished.get(order.unit, 0)
        masked = {masked_place for masked_place, _ in order.masked}
        while place in masked:
            place += 1
        return place if place < order.num_prompts else None

    def _lost(
        self, number: WorkerId, event: Event, error: str, now: float, rank: int | None = None
    ) -> None:
        worker = self.workers[number]
        rule = RULES[event]
        assert rule.worker is ForWorker.REPLACE
        self._count(event)
        self.counters.workers_lost += 1
        lost = _held(number, worker)
        self._log(f"worker lost: {event}", **lost, rank=rank, error=error)
        held_twice = {u for n, w in self.workers.items() if n != number for u in w.orders}
        alone = len(worker.orders) == 1
        for nth, order in enumerate(list(worker.orders.values())):
            if order.unit in held_twice:
                continue
            guilty = nth < self._limits.units_in_flight
            if rule.unit is ForUnit.CHARGE and guilty:
                place = self._suspect(worker, order)
                self._charge(order, error, place, now, sure=alone)
            else:
                self._schedule.requeue(order.unit)
        worker.orders.clear()
        self._forget(number)
        if rule.unit is ForUnit.CHARGE:
            self._pause_spawning(now)

    # ---- deadlines and pauses ----------------------------------------------------------------

    def _check_deadlines(self, now: float) -> None:
        limits = self._limits
        for number, worker in list(self.workers.items()):
            waited = now - worker.since
            if worker.phase is Phase.STARTING and waited > limits.start_deadline_seconds:
                error = f"its engine did not start within {limits.start_deadline_seconds:g} s"
                self._pool.kill(number)
                self._start_failed(StartFailed(number, error), now)
            elif worker.orders and waited > limits.unit_deadline_seconds:
                error = (
                    f"no result within {limits.unit_deadline_seconds:g} s; the worker was killed"
                )
                self._pool.kill(number)
                self._lost(number, Event.DEADLINE, error, now)
        self._check_shortage(now)
        since = self._store_failing_since
        if (
            self.ending is None
            and since is not None
            and now - since > limits.store_patience_seconds
        ):
            message = (
                f"the store has failed for {now - since:.0f} s; run the same command again later. "
                f"The last error:\n{self._store_error}"
            )
            self.end(Event.STORE_GONE, message, now)
        if self._drain_until is not None and now > self._drain_until:
            self._drop_all("the time to drain is over")

    def _check_shortage(self, now: float) -> None:
        """Fewer workers than the config's least for too long: the cluster cannot hold them."""
        ready = sum(worker.phase is Phase.READY for worker in self.workers.values())
        needed = min(self._limits.lowest, self._schedule.num_missing)
        placed = any(worker.phase is Phase.STARTING for worker in self.workers.values())
        if ready >= needed or placed or self.ending is not None:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since > self._limits.start_deadline_seconds and math.isfinite(now):
            message = (
                f"only {ready} of at least {needed} workers found room on the cluster within "
                f"{self._limits.start_deadline_seconds:g} s; lower workers.min or add nodes"
            )
            self.end(Event.NO_ROOM, message, now)

    def _back_off(self, error: str, now: float, *, store_works: bool) -> None:
        if store_works:
            self._store_failing_since = None
        elif self._store_failing_since is None:
            self._store_failing_since = now
        self._store_error = error
        if now >= self._paused_until:
            self._pause_seconds = min(MAX_PAUSE_SECONDS, max(1.0, 2 * self._pause_seconds))
            self._paused_until = now + self._pause_seconds
            self._log("store failing", pause_seconds=self._pause_seconds, error=error)

    def _pause_spawning(self, now: float) -> None:
        self._spawn_pause = min(MAX_PAUSE_SECONDS, max(0.5, 2 * self._spawn_pause))
        self._spawn_after = now + self._spawn_pause

    def _drop_all(self, why: str) -> None:
        for number, worker in list(self.workers.items()):
            if worker.orders:
                self._log("worker dropped", **_held(number, worker), why=why)
                worker.orders.clear()
            self._forget(number)

    def _forget(self, number: WorkerId) -> None:
        self._pool.kill(number)
        self.workers.pop(number, None)

    def _count(self, event: Event) -> None:
        self.counters.events[event] = self.counters.events.get(event, 0) + 1


def _held(number: WorkerId, worker: Worker) -> dict[str, Any]:
    """A worker and what it holds, as a log's fields."""
    attempts = [order.attempt for order in worker.orders.values()]
    return {"worker": number, "units": list(worker.orders), "attempts": attempts}
