"""Dispatching without a cluster: a scripted pool and a made-up clock."""

from __future__ import annotations

from typing import Any

import numpy as np

from capture.settings import EngineFacts, UnitResult, UnitStatus
from jobs import messages
from jobs.dispatch import Dispatcher
from jobs.fleet import DispatchLimits
from jobs.schedule import Schedule, UnitTable
from tests.jobs.fake_worker import model_manifest


class ScriptedPool:
    """Does nothing by itself; the test says what happens."""

    def __init__(self) -> None:
        self.events: list[messages.PoolEvent] = []
        self.sent: list[tuple[messages.WorkerId, messages.UnitOrder | None]] = []
        self.killed: list[messages.WorkerId] = []
        self.spawned = 0

    def spawn(self) -> messages.WorkerId:
        self.spawned += 1
        return self.spawned - 1

    def send(self, worker: messages.WorkerId, order: messages.UnitOrder | None) -> None:
        self.sent.append((worker, order))

    def kill(self, worker: messages.WorkerId) -> None:
        self.killed.append(worker)

    def poll(self, timeout: float) -> list[messages.PoolEvent]:
        del timeout
        events, self.events = self.events, []
        return events

    def start(self, worker: messages.WorkerId, node: str = "node") -> None:
        facts = messages.WorkerFacts(node, 1, EngineFacts(model_manifest("0" * 16), 64), 0.0)
        self.events += [messages.Placed(worker), messages.Started(worker, facts)]

    def orders(self, worker: messages.WorkerId | None = None) -> list[messages.UnitOrder]:
        return [o for w, o in self.sent if o is not None and worker in (None, w)]

    def commit(self, worker: messages.WorkerId, order: messages.UnitOrder, **fields: Any) -> None:
        result = UnitResult(order.unit, order.attempt, UnitStatus.COMMITTED, **fields)
        self.events.append(messages.Reported(worker, messages.WorkReport(results=(result,))))


def dispatcher(
    lengths: list[int], **limits: Any
) -> tuple[Dispatcher, ScriptedPool, Schedule, list[str]]:
    count = len(lengths)
    ones = np.ones(count, np.int64)
    units = UnitTable(0 * ones, np.arange(count), ones, np.array(lengths))
    schedule = Schedule(units, np.zeros(count, bool), max_attempts=2)
    pool, log = ScriptedPool(), []
    made = Dispatcher(
        schedule, pool, DispatchLimits(**limits), lambda event, **_: log.append(event)
    )
    return made, pool, schedule, log


def test_long_units_go_first_and_a_worker_holds_one_more_than_fits() -> None:
    drive, pool, _, _ = dispatcher([5, 50, 20, 40, 10])
    drive.step(0, 0)
    pool.start(0)
    drive.step(1, 0)
    drive.step(2, 0)
    assert [order.num_tokens for order in pool.orders()] == [50, 40]
    pool.events.append(messages.Reported(0, messages.WorkReport()))
    drive.step(3, 0)
    drive.step(4, 0)
    assert [order.num_tokens for order in pool.orders()] == [50, 40, 20]
    pool.commit(0, pool.orders()[0])
    drive.step(5, 0)
    drive.step(6, 0)
    assert [order.num_tokens for order in pool.orders()] == [50, 40, 20, 10]


def test_a_lost_node_charges_nobody_and_a_death_charges_what_ran() -> None:
    for cause, charged in (
        (messages.LossCause.NODE_LOST, 0),
        (messages.LossCause.PREEMPTED, 0),
        (messages.LossCause.DIED, 1),
    ):
        drive, pool, schedule, _ = dispatcher([1, 1], units_in_flight=1)
        drive.step(0, 0)
        pool.start(0)
        drive.step(1, 0)
        drive.step(2, 0)
        assert len(pool.orders()) == 2
        pool.events.append(messages.Lost(0, cause, "gone"))
        drive.step(3, 0)
        assert [schedule.charges(0), schedule.charges(1)] == [charged, 0]


def test_a_unit_under_suspicion_runs_alone() -> None:
    drive, pool, schedule, _ = dispatcher([9, 8, 7, 6], highest=2, units_in_flight=1)
    drive.step(0, 0)
    pool.start(0)
    pool.start(1)
    drive.step(1, 0)
    drive.step(2, 0)
    first = pool.orders(0)[0]
    result = UnitResult(first.unit, first.attempt, UnitStatus.FAILED, error="ValueError: no")
    pool.events.append(messages.Reported(0, messages.WorkReport(results=(result,))))
    drive.step(3, 0)
    assert schedule.charges(first.unit) == 1
    for now in range(4, 12):
        for worker in list(drive.workers):
            held = list(drive.workers[worker].orders.values())
            if held and drive.workers[worker].calls:
                if any(order.unit == first.unit for order in held):
                    assert len(held) == 1
                pool.commit(worker, held[0])
        drive.step(now, 0)
    assert drive.finished


def test_draining_nodes_get_nothing_new_and_are_replaced() -> None:
    drive, pool, _, log = dispatcher([1] * 9, units_in_flight=1)
    drive.step(0, 0)
    pool.start(0, node="leaving")
    drive.step(1, 0)
    drive.drain_nodes(frozenset({"leaving"}))
    drive.step(2, 0)
    assert "draining" in log
    assert not pool.orders()
    assert pool.spawned == 2
    assert pool.killed == [0]


def test_a_draining_worker_finishes_what_it_has_and_is_given_back() -> None:
    drive, pool, _, _ = dispatcher([1] * 9, units_in_flight=1)
    drive.step(0, 0)
    pool.start(0, node="leaving")
    drive.step(1, 0)
    drive.step(2, 0)
    first, second = pool.orders(0)
    drive.drain_nodes(frozenset({"leaving"}))
    pool.commit(0, first)
    drive.step(3, 0)
    drive.step(4, 0)
    assert pool.orders(0) == [first, second]
    assert not pool.killed
    pool.commit(0, second)
    drive.step(5, 0)
    drive.step(6, 0)
    assert pool.killed == [0]


def test_a_straggler_is_doubled_only_if_asked_and_the_first_commit_counts() -> None:
    for asked in (False, True):
        drive, pool, schedule, _ = dispatcher(
            [9, 8], highest=2, lowest=2, units_in_flight=1, duplicate_stragglers=asked
        )
        drive.step(0, 0)
        pool.start(0)
        drive.step(1, 0)
        drive.step(2, 0)
        pool.start(1)
        drive.step(3, 0)
        drive.step(4, 0)
        assert len(pool.orders(1)) == int(asked)
        if asked:
            double = pool.orders(1)[0]
            pool.commit(1, double, stored=1)
            drive.step(5, 0)
            assert schedule.is_done(double.unit)
            assert drive.counters.stored == 1
            original = next(order for order in pool.orders(0) if order.unit == double.unit)
            pool.commit(0, original, stored=1)
            drive.step(6, 0)
            assert drive.counters.stored == 1


def test_too_little_room_on_the_cluster_ends_the_run_to_be_run_again() -> None:
    drive, pool, _, _ = dispatcher([1, 1], lowest=2, highest=2, start_deadline_seconds=60)
    drive.step(0, 0)
    pool.start(0)
    drive.step(1, 0)
    drive.step(2, 0)
    drive.step(70, 0)
    assert drive.ending is not None
    assert drive.ending.exit_code == 75
    assert "found room" in drive.ending.message


def test_a_run_goes_on_with_fewer_workers_than_it_may_have() -> None:
    drive, pool, _, _ = dispatcher([1, 1, 1], lowest=1, highest=3, start_deadline_seconds=60)
    drive.step(0, 0)
    assert pool.spawned == 3
    pool.start(1)
    drive.step(1, 0)
    drive.step(500, 0)
    assert drive.ending is None
    assert pool.orders(1)


def test_workers_without_work_are_given_back() -> None:
    drive, pool, _, log = dispatcher([1, 1, 1], lowest=1, highest=3, units_in_flight=1)
    drive.step(0, 0)
    for worker in range(3):
        pool.start(worker)
    drive.step(1, 0)
    drive.step(2, 0)
    assert len({worker for worker, order in pool.sent if order is not None}) == 3
    pool.commit(0, pool.orders(0)[0])
    drive.step(3, 0)
    drive.step(4, 0)
    assert log.count("worker released") == 1
    assert pool.killed == [0]


def test_what_befalls_a_unit_is_logged_with_unit_attempt_worker_and_rank() -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    drive, pool, _, _ = dispatcher([5, 4], units_in_flight=1)
    drive._log = lambda event, **fields: said.append((event, fields))
    drive.step(0, 0)
    pool.start(0)
    drive.step(1, 0)
    drive.step(2, 0)
    first, second = pool.orders()
    failed = UnitResult(first.unit, first.attempt, UnitStatus.FAILED, error="E: no", rank=1)
    pool.events.append(messages.Reported(0, messages.WorkReport(results=(failed,))))
    drive.step(3, 0)
    pool.events.append(
        messages.Reported(0, messages.WorkReport(dead="EngineDead: gone", dead_rank=1))
    )
    drive.step(4, 0)
    fields = dict(said)["unit failed"]
    named = ("unit", "attempt", "worker", "rank", "error")
    assert [fields[name] for name in named] == [first.unit, first.attempt, 0, 1, "E: no"]
    fields = dict(said)["worker lost: engine died"]
    named = ("units", "attempts", "worker", "rank")
    assert [fields[name] for name in named] == [[second.unit], [second.attempt], 0, 1]


def test_a_node_where_nothing_starts_ends_no_run_that_others_go_on_with() -> None:
    drive, pool, schedule, log = dispatcher([1] * 40, lowest=1, highest=2)
    now = 0.0
    failed = 0
    while not drive.finished and now < 10_000:
        drive.step(now, 0)
        now += 1
        if now == 1:
            pool.start(0)
        for worker in drive.workers:
            if worker > 0:
                failed += 1
                pool.events.append(messages.StartFailed(worker, "ECC", messages.LossCause.DIED))
        if order := next((o for o in pool.orders(0) if not schedule.is_done(o.unit)), None):
            pool.commit(0, order, stored=1)
    assert failed > 3
    assert schedule.num_missing == 0
    assert "ending" not in log


def test_nobody_left_and_nothing_that_starts_ends_the_run() -> None:
    drive, pool, schedule, _ = dispatcher([1] * 8, lowest=1, highest=1)
    drive.step(0, 0)
    pool.start(0)
    drive.step(1, 0)
    drive.step(2, 0)
    pool.commit(0, pool.orders(0)[0])
    pool.events.append(messages.Lost(0, messages.LossCause.DIED, "gone"))
    now, failed = 3.0, 0
    while not drive.finished and now < 10_000:
        drive.step(now, 0)
        now += 1
        for worker in drive.workers:
            failed += 1
            pool.events.append(messages.StartFailed(worker, "ECC", messages.LossCause.DIED))
    assert failed == 3
    assert "no worker would start" in str(drive.ending)
    assert schedule.num_missing == 7
