"""The failure policy: every row of the table, the order of tries, and what stops a run."""

from __future__ import annotations

import pytest

from capture.settings import UnitStatus
from jobs.errors import ExitCode
from jobs.policy import (
    RESULTS,
    RULES,
    Event,
    ForRun,
    ForUnit,
    ForWorker,
    SameErrorGuard,
    Try,
    next_try,
    signature,
)

TABLE = [
    (Event.COMMITTED, ForUnit.DONE, ForWorker.KEEP, ForRun.GO_ON, None),
    (Event.SUPERSEDED, ForUnit.DONE, ForWorker.KEEP, ForRun.GO_ON, None),
    (Event.UNIT_FAILED, ForUnit.CHARGE, ForWorker.KEEP, ForRun.GO_ON, None),
    (Event.ENGINE_DIED, ForUnit.CHARGE, ForWorker.REPLACE, ForRun.GO_ON, None),
    (Event.DEADLINE, ForUnit.CHARGE, ForWorker.REPLACE, ForRun.GO_ON, None),
    (Event.NODE_LOST, ForUnit.REQUEUE, ForWorker.REPLACE, ForRun.GO_ON, None),
    (Event.PREEMPTED, ForUnit.REQUEUE, ForWorker.REPLACE, ForRun.GO_ON, None),
    (Event.STORE_FAILED, ForUnit.REQUEUE, ForWorker.KEEP, ForRun.BACK_OFF, None),
    (Event.STORE_REFUSES, ForUnit.CHARGE, ForWorker.KEEP, ForRun.BACK_OFF, None),
    (Event.START_FAILED, ForUnit.NOTHING, ForWorker.REPLACE, ForRun.GO_ON, None),
    (Event.START_DEADLINE, ForUnit.NOTHING, ForWorker.REPLACE, ForRun.GO_ON, None),
    (Event.SIGTERM, ForUnit.NOTHING, ForWorker.KEEP, ForRun.DRAIN, ExitCode.INTERRUPTED),
    (Event.OTHER_DRIVER, ForUnit.NOTHING, ForWorker.KEEP, ForRun.DRAIN, ExitCode.INTERRUPTED),
    (Event.QUOTA, ForUnit.NOTHING, ForWorker.KEEP, ForRun.DRAIN, ExitCode.REFUSED),
    (Event.SAME_ERROR, ForUnit.NOTHING, ForWorker.KEEP, ForRun.STOP, ExitCode.REFUSED),
    (Event.STORE_GONE, ForUnit.NOTHING, ForWorker.KEEP, ForRun.STOP, ExitCode.INTERRUPTED),
    (Event.NO_WORKERS, ForUnit.NOTHING, ForWorker.KEEP, ForRun.STOP, ExitCode.REFUSED),
    (Event.NO_ROOM, ForUnit.NOTHING, ForWorker.KEEP, ForRun.STOP, ExitCode.INTERRUPTED),
    (Event.CLUSTER_GONE, ForUnit.NOTHING, ForWorker.KEEP, ForRun.STOP, ExitCode.INTERRUPTED),
    (Event.HOPELESS, ForUnit.NOTHING, ForWorker.KEEP, ForRun.STOP, ExitCode.REFUSED),
]


@pytest.mark.parametrize(("event", "unit", "worker", "run", "code"), TABLE)
def test_each_row_of_the_table(
    event: Event, unit: ForUnit, worker: ForWorker, run: ForRun, code: int | None
) -> None:
    rule = RULES[event]
    assert (rule.unit, rule.worker, rule.run, rule.exit_code) == (unit, worker, run, code)


def test_the_table_has_a_row_for_every_event() -> None:
    assert set(RULES) == set(Event) == {row[0] for row in TABLE}


def test_a_unit_is_tried_together_then_alone_then_one_by_one() -> None:
    tries = [next_try(charges, max_attempts=3) for charges in range(6)]
    assert tries == [Try.TOGETHER, Try.ALONE, Try.ALONE, *[Try.ONE_BY_ONE] * 3]


ANSWERS = [
    (UnitStatus.COMMITTED, False, Event.COMMITTED),
    (UnitStatus.SUPERSEDED, False, Event.SUPERSEDED),
    (UnitStatus.FAILED, False, Event.UNIT_FAILED),
    (UnitStatus.FAILED, True, Event.STORE_FAILED),
]


@pytest.mark.parametrize(("status", "store_failed", "event"), ANSWERS)
def test_each_row_of_what_a_result_means(
    status: UnitStatus, store_failed: bool, event: Event
) -> None:
    assert RESULTS[status, store_failed] is event


def test_there_is_no_other_result() -> None:
    assert set(RESULTS) == {row[:2] for row in ANSWERS}
    assert {status for status, _ in RESULTS} == set(UnitStatus)


def test_equal_errors_are_told_whatever_their_numbers() -> None:
    first = "Traceback ...\n  File x\nRuntimeError: unit 7 at 0x7f00deadbeef failed after 3 s\n"
    second = "Traceback ...\n  File y\nRuntimeError: unit 19 at 0x7f00cafe0000 failed after 4 s"
    assert signature(first) == signature(second)
    assert signature(first) != signature("ValueError: unit 7")


def test_the_same_error_stops_a_run_only_before_anything_worked() -> None:
    guard = SameErrorGuard()
    assert [guard.unit_failed(unit, "E: bad 1") for unit in (1, 2, 3)] == [False, False, True]
    guard = SameErrorGuard()
    assert [guard.unit_failed(unit, "E: bad 1") for unit in (1, 2, 1, 2)] == [False] * 3 + [True]
    guard = SameErrorGuard()
    assert not any(guard.unit_failed(1, "E: bad 1") for _ in range(9))
    guard = SameErrorGuard()
    assert not any(guard.unit_failed(unit, f"E: {'abc'[unit]}") for unit in range(3))
    guard = SameErrorGuard()
    guard.success()
    assert not any(guard.unit_failed(unit, "E: bad") for unit in range(10))


def test_failing_starts_stop_a_run_only_in_a_row() -> None:
    guard = SameErrorGuard()
    assert [guard.start_failed() for _ in range(2)] == [False, False]
    guard.started()
    assert [guard.start_failed() for _ in range(3)] == [False, False, True]
