"""Units begin only while their rows fit; the engine below is scripted, nothing is captured."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from capture.adapters.vllm_engine import Finished
from capture.assembly import RankReport
from capture.commit_unit import CaptureShape
from capture.engine import CaptureEngine
from capture.rank import RankCapture, RankFacts
from capture.rows import Positions, Run
from capture.settings import (
    CaptureSettings,
    Generation,
    PromptTask,
    StoreLocation,
    UnitResult,
    UnitStatus,
    UnitTask,
)
from capture.shard_loop import ShardLoop
from store.run_format import LayerSemantics, Site
from tests.capture import random_engine

LAYER = LayerSemantics(
    layer=0, module="a", num_heads=1, num_kv_heads=1, head_size=1, v_head_size=1, scale=1.0
)


class ScriptedEngine:
    """Ends one request a step, and reports every sealed unit as failed."""

    def __init__(self) -> None:
        config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["Scripted"]), get_hidden_size=lambda: 1
        )
        self.vllm_config = SimpleNamespace(model_config=config)
        self.queued: list[tuple[int, int]] = []
        self.begun: list[int] = []
        self.sealed: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self.queued)

    def add(self, unit: int, prompt: int, token_ids: np.ndarray, **_: Any) -> None:
        self.queued.append((unit, prompt))

    def step(self) -> list[Finished]:
        unit, prompt = self.queued.pop(0)
        return [Finished(unit, prompt, None)]

    def call(self, method: str, *args: Any) -> list[Any]:
        if method == "capture_begin_unit":
            self.begun.append(args[0].unit)
        if method == "capture_seal_unit":
            self.sealed.append(args[0])
        if method == "capture_poll":
            sealed, self.sealed = self.sealed, []
            return [[RankReport(key, 3, error="scripted") for key in sealed]]
        return [None]


def start(
    folder: Path, buffer_bytes: int, positions: Positions, **of_patterns: int
) -> CaptureEngine:
    rank = RankFacts(
        rank=3,
        layers=(),
        heads={"z": (0,)},
        probes=(),
        bytes_per_row=10,
        host_bytes=0,
        device_bytes=0,
        max_step_rows=0,
        **of_patterns,
    )
    settings = CaptureSettings(sites=(Site.Z,), buffer_bytes=buffer_bytes, positions=positions)
    shape = CaptureShape("00" * 8, "float32", (LAYER,), settings, (rank,))
    return CaptureEngine(ScriptedEngine(), shape, StoreLocation(str(folder)))  # type: ignore[arg-type]


def task(unit: int, *lengths: int) -> UnitTask:
    prompts = tuple(PromptTask(np.zeros(length, np.int32)) for length in lengths)
    return UnitTask(unit, "a", 10 * unit, prompts)


def begun_in_order(engine: CaptureEngine) -> list[int]:
    """Run to the end; at no time may begun units exceed the budget unless one runs alone."""
    scripted: Any = engine.step_engine
    reported: list[int] = []
    for _ in range(1000):
        sizes = [ROWS[unit] for unit in scripted.begun if unit not in reported]
        assert len(sizes) == 1 or sum(sizes) * 10 <= 100, (sizes, reported)
        results = engine.advance()
        assert {(result.error, result.rank) for result in results} <= {("scripted", 3)}
        reported += [result.unit for result in results]
        if not engine.in_flight:
            return list(scripted.begun)
    raise AssertionError("some unit never ended")


ROWS = (4, 6, 1, 50, 7)


def test_units_wait_for_the_rows_of_others_to_leave(tmp_path: Path) -> None:
    engine = start(tmp_path, 100, Positions())
    for unit, length in enumerate(ROWS):
        engine.admit(task(unit, length))
    assert engine.step_engine.begun == [0, 1]  # type: ignore[attr-defined]
    assert engine.in_flight == 5
    assert begun_in_order(engine) == [0, 1, 2, 3, 4]


def test_rows_kept_for_patterns_and_their_entries_count_exactly(tmp_path: Path) -> None:
    patterns = {"kept_bytes_per_row": 5, "bytes_per_entry": 2}
    # Prompts of 4 and 3 rows: 7 rows of 15 bytes and 10 + 6 entries of 2.
    for buffer_bytes, begun in ((2 * 137, [0, 1]), (2 * 137 - 1, [0])):
        engine = start(tmp_path, buffer_bytes, Positions(), **patterns)
        engine.admit(task(0, 4, 3))
        engine.admit(task(1, 3, 4))
        assert engine.step_engine.begun == begun  # type: ignore[attr-defined]


def test_a_trial_takes_the_rows_of_fewer_generated_tokens(tmp_path: Path) -> None:
    engine = random_engine.start(
        tmp_path,
        CaptureSettings(host_bytes=16 << 20, slot_bytes=1 << 20, generation=Generation(50)),
    )
    for unit, (most, rows) in enumerate([(None, 52), (90, 52), (2, 4), (1, 3)]):
        engine.admit(replace(random_engine.task(unit, unit, [3]), max_tokens=most))
        (layout,) = [one.layout for one in engine._units.values() if one.task.unit == unit]
        assert layout.total_rows == rows
    engine.shutdown()


@pytest.mark.parametrize("length", [1, 400])
def test_rows_that_are_not_kept_do_not_count(tmp_path: Path, length: int) -> None:
    engine = start(tmp_path, 20, Positions(-1, None))
    for unit in range(3):
        engine.admit(task(unit, length))
    assert engine.step_engine.begun == [0, 1]  # type: ignore[attr-defined]


def test_a_prompt_that_keeps_no_position_does_not_run(tmp_path: Path) -> None:
    engine = start(tmp_path, 1000, Positions(8, None))
    engine.admit(task(0, 8, 9))
    assert engine.step_engine.queued == [(0, 1)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("batch_prompts", [0, 1, 2])
def test_a_unit_whose_requests_vllm_ends_fails_once_with_what_vllm_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_prompts: int
) -> None:
    def ended(self: random_engine.RandomEngine) -> list[Finished]:
        return [replace(one, error="vLLM ended the request: abort") for one in step(self)]

    step = random_engine.RandomEngine.step
    monkeypatch.setattr(random_engine.RandomEngine, "step", ended)
    engine = random_engine.start(tmp_path, CaptureSettings(host_bytes=16 << 20, slot_bytes=1 << 20))
    engine.admit(replace(random_engine.task(0, 0, [3, 4, 5, 6]), batch_prompts=batch_prompts))
    deadline = time.monotonic() + 60
    results: list[UnitResult] = []
    while engine.in_flight and time.monotonic() < deadline:
        results += engine.advance()
    (result,) = results
    assert result.status is UnitStatus.FAILED
    assert result.error == "vLLM ended the request: abort"
    assert not engine.step_engine.busy
    engine.shutdown()


def reached_when_it_failed(engine: CaptureEngine) -> tuple[int, UnitResult]:
    """Run the only unit to its end; return how far it had come and its result."""
    deadline, reached = time.monotonic() + 60, 0
    results: list[UnitResult] = []
    while engine.in_flight and time.monotonic() < deadline:
        reached = max(reached, engine.prompts_finished(0))
        results += engine.advance()
    (result,) = results
    return reached, result


@pytest.mark.parametrize("where", ["in the step", "in a writer"])
@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_unit_that_runs_prompt_by_prompt_stops_at_the_one_that_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, bad: int
) -> None:
    ran: list[int] = []
    step, end_step = random_engine.RandomEngine.step, RankCapture.end_step

    def noted(self: random_engine.RandomEngine) -> list[Finished]:
        ran.extend(prompt for _, prompt, _ in self._queue)
        return step(self)

    def ends(self: RankCapture, error: str | None) -> None:
        end_step(self, "the probe failed" if where == "in the step" and ran[-1] == bad else error)

    place = ShardLoop._place_run

    def placed(self: ShardLoop, unit: Any, tap: int, run: Run, staged: np.ndarray) -> None:
        if where == "in a writer" and unit.layout.prompt_at(run.row)[0] == bad:
            raise MemoryError("no room for it")
        place(self, unit, tap, run, staged)

    monkeypatch.setattr(random_engine.RandomEngine, "step", noted)
    monkeypatch.setattr(RankCapture, "end_step", ends)
    monkeypatch.setattr(ShardLoop, "_place_run", placed)
    settings = CaptureSettings(host_bytes=16 << 20, slot_bytes=1 << 20)
    engine = random_engine.start(tmp_path, settings)
    engine.admit(replace(random_engine.task(0, 0, [3, 4, 5, 6]), batch_prompts=1))
    reached, result = reached_when_it_failed(engine)
    assert result.status is UnitStatus.FAILED
    assert not result.store_failed
    assert ("the probe failed" if where == "in the step" else "no room for it") in result.error
    assert ran == list(range(bad + 1))
    assert reached == bad
    assert not engine.step_engine.busy
    engine.shutdown()
