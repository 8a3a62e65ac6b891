"""What bounds a capture is found in a capture: a slow model, a throttled store, want of work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from capture.settings import CaptureSettings, UnitResult, UnitStatus
from jobs.bound import find_bound
from jobs.status import read_status
from store import keys
from store.attempt import AttemptWriter
from store.objects.open import open_store
from store.plan_writer import write_segment
from store.run_format import RunManifest
from tests.capture.random_engine import start, task
from tests.store.sample_run import plan_tables

UNITS = 5
SLOW = 0.1


def captured(folder: Path, *, slow_step: float = 0.0, pause: float = 0.0) -> list[UnitResult]:
    """Capture some units, two in flight, or one at a time with a pause before the next."""
    settings = CaptureSettings(host_bytes=4 << 20, slot_bytes=256 << 10, writer_threads=2)
    engine = start(folder, settings)
    scripted: Any = engine.step_engine
    scripted.slow_step = slow_step
    waiting = [task(unit, 4 * unit, [60, 60, 60, 60]) for unit in range(UNITS)]
    results: list[UnitResult] = []
    while waiting or engine.in_flight:
        while waiting and engine.in_flight < (1 if pause else 2):
            time.sleep(pause)
            engine.admit(waiting.pop(0))
        results += engine.advance()
    engine.shutdown()
    assert {result.status for result in results} == {UnitStatus.COMMITTED}, results
    return results


def bound_of(folder: Path, results: list[UnitResult]) -> tuple[str, str]:
    """Return what bounded them by the results, and by what `status` reads."""
    told: dict[str, float] = {}
    for result in results:
        for name, seconds in result.timings.items():
            told[name] = told.get(name, 0.0) + seconds
    assert {"engine", "wait", "idle", "copy", "encode", "put", "commit"} == set(told)
    objects = open_store(str(folder))
    run = RunManifest(run_id="0" * 16, created="", frozen={}, config={}, versions={})
    objects.put(keys.RUN, [run.to_bytes()])
    tables = plan_tables([[60] * 4] * UNITS)
    write_segment(objects, run_id=run.run_id, segment=0, **tables)
    found, in_status = find_bound(told), read_status(objects).bound
    assert found is not None
    assert in_status is not None
    return found.stage, in_status.stage


@pytest.fixture
def throttled_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every put of a shard takes `SLOW` seconds longer."""
    put = AttemptWriter.put_shard

    def slow_put(*args: Any) -> Any:
        time.sleep(SLOW)
        return put(*args)

    monkeypatch.setattr(AttemptWriter, "put_shard", slow_put)


def test_a_slow_model_bounds_its_run(tmp_path: Path) -> None:
    results = captured(tmp_path, slow_step=1.5)
    assert bound_of(tmp_path, results) == ("engine", "engine")


@pytest.mark.usefixtures("throttled_store")
def test_a_throttled_store_bounds_its_run(tmp_path: Path) -> None:
    results = captured(tmp_path)
    assert bound_of(tmp_path, results) == ("put", "put")
    # Eight shards a unit over two writers.
    assert sum(result.timings["put"] for result in results) >= UNITS * 8 * SLOW


def test_want_of_work_bounds_a_run_that_waits_for_units(tmp_path: Path) -> None:
    results = captured(tmp_path, pause=1.0)
    assert bound_of(tmp_path, results) == ("idle", "idle")


@pytest.mark.usefixtures("throttled_store")
def test_a_full_host_counts_as_waiting_not_as_computing(tmp_path: Path) -> None:
    """One unit larger than the slabs: the step itself waits for room."""
    settings = CaptureSettings(host_bytes=1 << 20, slot_bytes=200 << 10, writer_threads=2)
    engine = start(tmp_path, settings)
    engine.admit(task(0, 0, [256] * 12))
    results: list[UnitResult] = []
    while engine.in_flight:
        results += engine.advance()
    stalled: Any = engine.step_engine
    assert stalled.rank.timings["stall"] > 0
    assert results[0].timings["wait"] >= stalled.rank.timings["stall"]
    engine.shutdown()
