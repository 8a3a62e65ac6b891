"""The engine's time is told apart: computing, waiting for slabs inside a step, waiting, idle."""

from __future__ import annotations

import time

from capture.assembly import RankReport
from capture.engine_clock import EngineClock, stage_seconds


def test_time_between_units_is_idle_and_is_told_once() -> None:
    clock = EngineClock()
    clock.admitted()
    assert clock.taken() == {"engine": 0.0, "wait": 0.0, "idle": 0.0}
    clock.emptied()
    time.sleep(0.02)
    clock.admitted()
    clock.engine += 2.0
    spent = clock.taken()
    assert spent["engine"] == 2.0
    assert spent["idle"] >= 0.02
    assert clock.taken() == {"engine": 0.0, "wait": 0.0, "idle": 0.0}


def test_the_slowest_rank_s_wait_for_slabs_is_no_computing() -> None:
    reports = [
        RankReport(0, 0, timings={"put": 1.0, "stall": 3.0}),
        RankReport(0, 1, timings={"put": 2.0, "stall": 2.0}),
    ]
    spent = {"engine": 10.0, "wait": 1.0, "idle": 0.5}
    assert stage_seconds(reports, spent) == {"put": 3.0, "engine": 7.0, "wait": 4.0, "idle": 0.5}
    # A wait that an earlier unit's time already held is not taken off twice.
    assert stage_seconds(reports, {**spent, "engine": 2.0})["engine"] == 0.0
