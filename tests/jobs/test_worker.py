"""The worker around a scripted engine: when its calls return, and what it says of a dead engine."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jobs.worker
from capture.self_check import SelfCheck
from capture.settings import (
    CaptureSettings,
    EngineFacts,
    EngineSettings,
    StoreLocation,
    UnitResult,
    UnitStatus,
    UnitTask,
)
from jobs.config import RunConfig
from jobs.messages import UnitOrder, WorkerSpec
from jobs.plan import write_plan
from jobs.schedule import QUARANTINED
from jobs.tasks import TaskReader
from jobs.worker import CaptureWorker
from store.checks import read_checks
from store.errors import StoreError
from store.objects.open import open_store
from tests.jobs.fake_worker import model_manifest
from tests.store.faults import FaultyStore

RUN_ID = "0" * 32


class ScriptedEngine:
    """Finishes one prompt a step, of the oldest unit."""

    def __init__(self) -> None:
        self.facts = EngineFacts(model_manifest(RUN_ID), 64)
        self.tasks: list[UnitTask] = []
        self.place = 0
        self.steps = 0
        self.fault: Exception | None = None
        self.lost_rank: int | None = None

    @property
    def in_flight(self) -> int:
        return len(self.tasks)

    def prompts_finished(self, unit: int) -> int:
        return self.place if self.tasks and self.tasks[0].unit == unit else 0

    def admit(self, task: UnitTask) -> None:
        self.tasks.append(task)

    def advance(self) -> list[UnitResult]:
        self.steps += 1
        if self.fault is not None:
            raise self.fault
        task = self.tasks[0]
        self.place += 1
        if self.place < len(task.prompts):
            return []
        self.place = 0
        self.tasks.pop(0)
        return [UnitResult(task.unit, task.attempt, UnitStatus.COMMITTED)]


class ScriptedWorker(CaptureWorker):
    engine: ScriptedEngine

    def place(self) -> str:
        return "node"

    def _start_engine(self) -> Any:
        self.engine = ScriptedEngine()
        return self.engine


@pytest.fixture
def worker(
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> ScriptedWorker:
    """A started worker over a plan of six units of two prompts; one prompt is empty."""
    config = make_config(write_prompts([*[f"w{i} w1 w2 w3" for i in range(11)], ""]))
    write_plan(open_store(config.output), config, run_id=RUN_ID)
    monkeypatch.setattr(jobs.worker, "_leave_soon", lambda: None)
    location = StoreLocation(config.output)
    spec = WorkerSpec(RUN_ID, location, EngineSettings("m"), CaptureSettings(), units_in_flight=2)
    made = ScriptedWorker(spec)
    assert made.start().engine.bytes_per_token == 64
    return made


def order(unit: int, **fields: Any) -> UnitOrder:
    return UnitOrder(
        unit=unit, attempt=f"a{unit}", segment=0, first_prompt=2 * unit, num_prompts=2,
        num_tokens=8, **fields,
    )  # fmt: skip


def test_a_call_returns_at_once_while_there_is_room_and_then_with_what_is_finished(
    worker: ScriptedWorker,
) -> None:
    assert worker.work(order(0)).results == ()
    assert worker.engine.steps == 0
    assert [result.unit for result in worker.work(order(1)).results] == [0]
    assert [result.unit for result in worker.work(None).results] == [1]
    assert worker.work(None).results == ()


def test_tokens_reasons_and_masks_come_from_the_plan_and_the_order(worker: ScriptedWorker) -> None:
    reason = f"{QUARANTINED}it killed two engines"
    worker.work(order(5, masked=((0, reason),), repair=3))
    (task,) = worker.engine.tasks
    assert (task.first_prompt, task.repair) == (10, 3)
    assert [prompt.reason for prompt in task.prompts] == [
        reason, "it is empty: no tokens to capture",
    ]  # fmt: skip
    worker.work(order(1))
    assert [p.token_ids.tolist() for p in worker.engine.tasks[-1].prompts] == [
        [2, 1, 2, 3], [3, 1, 2, 3],
    ]  # fmt: skip


def test_a_unit_in_batches_reports_every_step_of_its_way(worker: ScriptedWorker) -> None:
    first = worker.work(order(0, batch_prompts=1))
    assert (first.results, first.finished) == ((), {0: 1})
    second = worker.work(None)
    assert [result.unit for result in second.results] == [0]


def test_whatever_an_engine_raises_is_reported_with_its_traceback(worker: ScriptedWorker) -> None:
    worker.work(order(0, batch_prompts=1))
    worker.engine.fault, worker.engine.lost_rank = RuntimeError("the rank is gone"), 1
    report = worker.work(None)
    assert report.dead is not None
    assert report.dead_rank == 1
    assert "RuntimeError: the rank is gone" in report.dead
    assert report.finished == {0: 1}


def test_a_plan_that_cannot_be_read_fails_the_unit_and_not_the_worker(
    worker: ScriptedWorker, make_config: Callable[..., RunConfig]
) -> None:
    (prompts,) = Path(worker._spec.location.url).glob("plan/0000/prompts-*.parquet")
    data = bytearray(prompts.read_bytes())
    data[50] ^= 1
    prompts.write_bytes(data)
    (result,) = worker.work(order(0)).results
    assert result.status is UnitStatus.FAILED
    assert "DamagedObject" in str(result.error)
    assert not result.store_failed
    assert worker.engine.in_flight == 0


def test_a_plan_that_the_store_does_not_give_is_the_stores_failure(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_order: UnitOrder) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(worker._tasks, "task", refuses)
    (result,) = worker.work(order(0)).results
    assert (result.status, result.store_failed) == (UnitStatus.FAILED, True)


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_under_a_failing_unit_an_object_store_is_tried_with_another_object(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch, down: bool, local: bool
) -> None:
    """And a disk is not: it may be too full for a unit and not for what it is tried with."""

    def refuses(_order: UnitOrder) -> Any:
        raise StoreError("503 for this name alone")

    objects = open_store(f"memory://worker-{secrets.token_hex(4)}")
    monkeypatch.setattr(worker._tasks, "task", refuses)
    if not local:
        store = FaultyStore(objects, fail_at=0 if down else -1)
        monkeypatch.setattr(worker, "_objects", store)
    report = worker.work(order(0))
    assert [result.store_failed for result in report.results] == [True]
    assert report.store_works is not (down or local)
    assert list(objects.list("")) == []
    assert not list(worker._objects.list("checks/"))


def test_a_worker_whose_units_go_well_tries_no_store(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_objects", FaultyStore(worker._objects, fail_at=0))
    worker.work(order(0))
    assert not worker.work(None).store_works
    assert worker._objects.writes == 0  # type: ignore[attr-defined]


def test_only_a_self_check_that_passed_spares_the_next_worker_its_own(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import capture.self_check

    tried: list[int] = []

    def check(_engine: Any, prompts: Any, *_: Any) -> SelfCheck:
        tried.append(len(prompts))
        return SelfCheck(4, 16, 0.0, "", 0.0, None, "", 1e-3, None, "")

    monkeypatch.setattr(capture.self_check, "self_check", check)
    objects = open_store(worker._spec.location.url)
    # Left by a driver that was killed while it tried the store.
    objects.put("checks/probe-0123456789abcdef-0", [b"first"])
    worker._self_check(worker.engine)  # type: ignore[arg-type]
    assert tried == [4]
    worker._self_check(worker.engine)  # type: ignore[arg-type]
    assert tried == [4]
    (figures,) = read_checks(objects, RUN_ID)
    assert (figures.prompts, figures.tokens, figures.tolerance) == (4, 16, 1e-3)
    assert figures.tensor_parallel_size == 1


def test_other_ranks_or_libraries_are_checked_again(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import capture.self_check

    figures = SelfCheck(4, 16, 0.0, "", 0.0, None, "", 1e-3, None, "")
    monkeypatch.setattr(capture.self_check, "self_check", lambda *_: figures)
    engine, spec = worker.engine, worker._spec
    starts = [(1, {"vllm": "1"}), (2, {"vllm": "1"}), (2, {"vllm": "2"}), (1, {"vllm": "1"})]
    for ranks, versions in starts:
        settings = replace(spec.engine, tensor_parallel_size=ranks)
        worker._spec = replace(spec, engine=settings)
        model = engine.facts.model.model_copy(update={"versions": versions})
        engine.facts = replace(engine.facts, model=model)
        worker._self_check(engine)  # type: ignore[arg-type]
    made = read_checks(open_store(spec.location.url), RUN_ID)
    assert sorted((one.tensor_parallel_size, one.versions["vllm"]) for one in made) == [
        (1, "1"),
        (2, "1"),
        (2, "2"),
    ]


def test_a_check_of_nothing_is_not_kept(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import capture.self_check

    monkeypatch.setattr(capture.self_check, "self_check", lambda *_: None)
    worker._self_check(worker.engine)  # type: ignore[arg-type]
    assert read_checks(open_store(worker._spec.location.url), RUN_ID) == ()


PlannedTasks = Callable[[list[str], int], TaskReader]


@pytest.fixture
def planned_tasks(
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> PlannedTasks:
    """Plan texts, so many a file, and return the reader of the plan."""

    def plan(texts: list[str], per_file: int) -> TaskReader:
        monkeypatch.setattr("jobs.plan.PROMPTS_PER_FILE", per_file)
        config = make_config(write_prompts(texts))
        write_plan(open_store(config.output), config, run_id=RUN_ID)
        return TaskReader(open_store(config.output))

    return plan


def test_prompts_to_check_are_found_behind_files_without_any(planned_tasks: PlannedTasks) -> None:
    tasks = planned_tasks(["", "", "", "w1 w2", "w3", "w4 w5 w6", ""], 2)
    assert [len(ids) for ids in tasks.sample_prompts(2)] == [3, 1]
    assert [len(ids) for ids in tasks.sample_prompts(9)] == [3, 2, 1]


def test_prompts_to_check_are_long_ones_too_where_a_plan_begins_with_short_ones(
    planned_tasks: PlannedTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = planned_tasks([" ".join(["w1"] * n) for n in (1, 1, 1, 1, 1, 4, 2, 6)], 4)
    assert [len(ids) for ids in tasks.sample_prompts(4)] == [6, 2, 1, 1]
    monkeypatch.setattr("jobs.tasks._SAMPLED_FROM", 6)
    assert [len(ids) for ids in tasks.sample_prompts(1)] == [4]
    assert len(TaskReader(tasks._objects).sample_prompts(4)) == 4
