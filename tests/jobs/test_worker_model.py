"""A worker captures from the model that the run was made with, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import capture.engine
from capture.settings import CaptureSettings, EngineSettings, StoreLocation
from jobs.config import RunConfig
from jobs.frozen import frozen_fields
from jobs.messages import WorkerSpec
from jobs.worker import CaptureWorker
from store.errors import FrozenFieldChanged
from tests.jobs.test_worker import ScriptedEngine


class PlacedWorker(CaptureWorker):
    def place(self) -> str:
        return "node"


@pytest.fixture
def model(word_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(word_model, folder)
    (folder / "model.safetensors").write_bytes(bytes(50_000))
    return folder


@pytest.fixture
def config(
    make_config: Callable[..., RunConfig], write_prompts: Callable[..., Path], model: Path
) -> RunConfig:
    return make_config(write_prompts(["w1"]), model={"path": str(model)})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """What happens while an engine loads its weights, call by call; each leaves the list."""
    happens: list[Callable[[], Any]] = []

    def start(*_: object) -> ScriptedEngine:
        happens.pop(0)()
        return ScriptedEngine()

    monkeypatch.setattr(capture.engine.CaptureEngine, "start", start)
    return happens


def worker(config: RunConfig) -> PlacedWorker:
    spec = WorkerSpec(
        run_id="0" * 32,
        location=StoreLocation(config.output),
        engine=EngineSettings(config.model.path),
        capture=CaptureSettings(),
        model=config.model,
        frozen=frozen_fields(config),
    )
    return PlacedWorker(spec)


def exchange(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\1" * 50_000)


def test_the_run_s_own_model_is_started(config, started) -> None:
    started.append(lambda: None)
    assert worker(config).start().node == "node"
    assert started == []


def test_weights_exchanged_before_a_later_worker_starts_start_no_engine(
    config, model, started
) -> None:
    late = worker(config)
    exchange(model)
    started.append(lambda: None)
    with pytest.raises(FrozenFieldChanged, match=r"sampled_content.*a worker on .*, before"):
        late.start()
    assert len(started) == 1


def test_weights_exchanged_while_an_engine_loads_them_are_not_captured_from(
    config, model, started
) -> None:
    started.append(lambda: exchange(model))
    with pytest.raises(FrozenFieldChanged, match=r"sampled_content.*after the engine had loaded"):
        worker(config).start()


def test_a_link_to_the_newest_model_that_was_moved_on_is_noticed(
    make_config, write_prompts, model, tmp_path, started
) -> None:
    link = tmp_path / "latest"
    link.symlink_to(model)
    late = worker(make_config(write_prompts(["w1"]), model={"path": str(link)}))
    newer = tmp_path / "newer"
    shutil.copytree(model, newer)
    exchange(newer)
    link.unlink()
    link.symlink_to(newer)
    with pytest.raises(FrozenFieldChanged, match="latest"):
        late.start()


def test_a_node_without_the_model_says_so(config, model, started) -> None:
    late = worker(config)
    shutil.rmtree(model)
    with pytest.raises(FrozenFieldChanged, match=r"model\.fingerprint"):
        late.start()
