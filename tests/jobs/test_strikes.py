"""Strikes at real runs that every change must survive: many in few runs, as engines start slowly.

Real engine, real Ray, real store. A test strikes when it has seen in the run's own events that the
moment has come, and never after a time. Each ends with every prompt stored once and every byte
verified. What takes longer is in `test_chaos.py`; `make chaos` runs both.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from store.commit import committed_units, read_commit
from store.objects.open import open_store
from tests.jobs.run_process import SLOW, RunProcess, assert_complete, texts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

Configs = Callable[..., Path]


def test_killed_and_hung_ranks_and_a_killed_worker_cost_no_prompt(
    engine_config: Configs, tmp_path: Path
) -> None:
    """Two workers of two ranks. The engine core lives in the worker's process and dies with it."""
    config = engine_config(
        texts(600),
        engine={"tensor_parallel_size": 2, **SLOW},
        workers={"count": 2, "unit_deadline_seconds": 20},
    )
    with RunProcess(config) as run:
        run.wait_for("worker started", 2)
        run.wait_for("committed", 2)
        struck = run.named("worker started")[0]["worker"]
        os.kill(run.rank_pid(1, number=0), signal.SIGKILL)
        os.kill(run.worker_pid(1), signal.SIGKILL)
        lost = run.wait_for("worker lost: engine died", 2)
        assert sorted(event["worker"] for event in lost) == [0, 1]
        assert next(event["rank"] for event in lost if event["worker"] == struck) == 1
        assert all(len(event["units"]) == len(event["attempts"]) for event in lost)

        hung_worker = run.wait_for("worker started", 3)[2]["worker"]
        run.wait_for("assigned", lambda event: event["worker"] == hung_worker)
        hung = run.rank_pid(0, number=2)
        os.kill(hung, signal.SIGSTOP)
        run.wait_for("worker lost: deadline passed", lambda event: event["worker"] == hung_worker)
        assert run.finish() == 0, run.transcript()
    assert not psutil.pid_exists(hung)
    assert_complete(tmp_path / "run")


def test_a_run_that_was_stopped_damaged_and_killed_goes_on_each_time(
    engine_config: Configs, tmp_path: Path
) -> None:
    """SIGTERM, changed settings and prompts, a commit deleted, a second driver, SIGKILL."""
    output = tmp_path / "run"
    config = engine_config(texts(1500), engine=SLOW, workers={"drain_seconds": 200})
    with RunProcess(config) as run:
        run.wait_for("committed", 3)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 75, run.transcript()
        assert not run.named("worker dropped"), run.transcript()
        assert len(run.named("committed")) == len(run.named("assigned")), run.transcript()

    with RunProcess(config, "--set", "capture.codec=small") as changed:
        assert changed.finish() == 2
        assert any("raw" in line and "small" in line for line in changed.other), changed.other
    prompts = tmp_path / "prompts.jsonl"
    planned = prompts.read_bytes()
    prompts.write_bytes(planned.replace(b"number 7 ", b"number 8 ", 1))
    with RunProcess(config) as drifted:
        assert drifted.finish() == 2
        assert any("prompts.jsonl" in line for line in drifted.other), drifted.other
    prompts.write_bytes(planned)

    objects = open_store(str(output))
    unit, commit = next(iter(committed_units(objects).items()))
    before = read_commit(objects, commit).attempt
    objects.delete(commit)
    with RunProcess(config) as run:
        run.wait_for("starting")
        with RunProcess(config) as second:
            assert second.finish() == 75, second.transcript()
            assert any("works on this run" in line for line in second.other)
        # It is among the longest units, since those had gone first; so it does now.
        run.wait_for("committed", lambda event: event["unit"] == unit)
        assert read_commit(objects, commit).attempt != before
        worker = run.worker_pid()
        assert run.process.poll() is None, "the run ended before it could be killed"
        run.kill()

    prompts.unlink()
    with RunProcess(config) as last:
        assert last.finish() == 0, last.transcript()
        assert last.named("source not readable"), "a resume needs nothing but the store"
        starting = last.named("starting")[0]
        assert 0 < starting["missing"] < starting["units"]
    assert not psutil.pid_exists(worker)
    assert_complete(output)
