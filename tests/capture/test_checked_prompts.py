"""Which prompts the self-check compares: those that the engine stored, whatever else was tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture import self_check as checking
from capture.errors import SelfCheckFailed
from capture.reference import ReferencePatterns
from capture.settings import EngineFacts, StoreLocation, UnitResult, UnitStatus, UnitTask
from store import attention
from store.commit import commit_unit
from store.objects.open import open_store
from tests.store.sample_run import SampleShape, SampleUnit, model_manifest, write_unit

SHAPE = SampleShape()
MODEL = model_manifest(SHAPE)
REFUSED = 999
"""An engine refuses prompts that hold this token."""


def rows_of(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return what the model computes of a prompt: site -> [L, T, H, D], z its pattern times v."""
    drawn = [np.random.default_rng([int(token), pos]) for pos, token in enumerate(ids)]
    rows: dict[str, np.ndarray] = {}
    for site in ("rot_q", "rot_k", "v"):
        size = (SHAPE.num_layers, SHAPE.heads(site), SHAPE.head_size)
        rows[site] = np.stack([rng.standard_normal(size) for rng in drawn], 1).astype(np.float32)
    group = SHAPE.num_heads // SHAPE.num_kv_heads
    v_LHTD = rows["v"].repeat(group, axis=2).swapaxes(1, 2)
    rows["z"] = (patterns_of(rows) @ v_LHTD).swapaxes(1, 2)
    return rows


def patterns_of(rows: dict[str, np.ndarray]) -> np.ndarray:
    heads = [
        attention.HeadRows(
            rows[site][layer].swapaxes(0, 1),
            tuple(range(SHAPE.heads(site))),
            np.arange(rows[site].shape[1]),
        )
        for layer in range(SHAPE.num_layers)
        for site in ("rot_q", "rot_k")
    ]
    pairs = zip(MODEL.layers, heads[::2], heads[1::2], strict=True)
    return np.stack([attention.pattern(layer, q, k) for layer, q, k in pairs])


class ScriptedEngine:
    """Commits units of `rows_of` through the real writer; refuses prompts as vLLM does."""

    def __init__(self) -> None:
        self.facts = EngineFacts(MODEL, bytes_per_token=1)
        self.waiting: list[UnitTask] = []
        self.seen: list[UnitTask] = []
        self.location = StoreLocation("")

    @property
    def in_flight(self) -> int:
        return len(self.waiting)

    def reopen(self, location: StoreLocation) -> None:
        self.location = location

    def admit(self, task: UnitTask) -> None:
        self.waiting.append(task)
        self.seen.append(task)

    def advance(self) -> list[UnitResult]:
        task = self.waiting.pop()
        prompts = [prompt.token_ids for prompt in task.prompts]
        lengths = [0 if self._refuses(task, ids) else len(ids) for ids in prompts]
        unit = SampleUnit(task.unit, task.first_prompt, lengths)
        rows = [rows_of(ids) for ids, length in zip(prompts, lengths, strict=True) if length]
        for site in SHAPE.sites if rows else ():
            unit.arrays[site] = np.concatenate([one[site] for one in rows], axis=1)
        objects = open_store(self.location.url)
        commit_unit(objects, write_unit(objects, SHAPE, unit, task.attempt))
        return [UnitResult(task.unit, task.attempt, UnitStatus.COMMITTED)]

    def _refuses(self, task: UnitTask, ids: np.ndarray) -> bool:
        return REFUSED in ids


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts whose patterns transformers was asked for; it gives the right ones."""
    seen: list[list[int]] = []

    def patterns(_model: str, ids: np.ndarray, layers: list[int]) -> ReferencePatterns:
        seen.append(ids.tolist())
        made = patterns_of(rows_of(ids))
        return ReferencePatterns({layer: made[layer] for layer in layers})

    monkeypatch.setattr(checking, "reference_patterns", patterns)
    return seen


def check(
    tmp_path: Path, *prompts: list[int], engine: ScriptedEngine | None = None
) -> checking.SelfCheck | None:
    ids = [np.array(prompt, np.int32) for prompt in prompts]
    location = StoreLocation(str(tmp_path))
    return checking.self_check(engine or ScriptedEngine(), ids, location, "model")


def test_transformers_is_asked_of_the_longest_stored_prompt(tmp_path: Path, asked: Any) -> None:
    refused = [REFUSED, *range(20)]
    found = check(tmp_path, [1, 2, 3], refused, [4, 5, 6, 7, 8], [9])
    assert asked == [[4, 5, 6, 7, 8]]
    assert found is not None
    assert (found.prompts, found.tokens) == (3, 9)
    assert found.reference is not None
    assert found.reference < 1e-6
    assert found.mixed is not None
    assert found.mixed < 1e-5


def test_rows_of_others_do_not_stand_in_for_a_refused_prompts(tmp_path: Path, asked: Any) -> None:
    assert check(tmp_path, [REFUSED, 1, 2, 3], [1, 2, 3], [4, 5]) is not None
    assert asked == [[1, 2, 3]]


def test_a_prompt_that_only_a_batch_loses_stops_the_run(tmp_path: Path, asked: Any) -> None:
    class Forgetful(ScriptedEngine):
        def _refuses(self, task: UnitTask, ids: np.ndarray) -> bool:
            return task.unit == checking.TOGETHER and len(ids) == 2

    with pytest.raises(SelfCheckFailed, match=r"\[0, 1\] were stored alone, \[0\] in a batch"):
        check(tmp_path, [1, 2, 3], [4, 5], engine=Forgetful())


def test_a_check_of_refused_prompts_alone_has_not_taken_place(tmp_path: Path, asked: Any) -> None:
    assert check(tmp_path, [REFUSED], [3, REFUSED]) is None
    assert check(tmp_path) is None
    assert check(tmp_path, []) is None
    assert asked == []


def test_patterns_that_are_not_transformers_own_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(_model: str, ids: np.ndarray, _layers: list[int]) -> ReferencePatterns:
        made = patterns_of(rows_of(ids))
        return ReferencePatterns({1: made[1][[0, 1, 3, 2]]})

    monkeypatch.setattr(checking, "reference_patterns", other)
    with pytest.raises(SelfCheckFailed, match=r"eager attention. At layer 1, head [23] they"):
        check(tmp_path, [1, 2, 3])


def test_prompts_are_hardly_continued_whatever_the_run_says(tmp_path: Path, asked: Any) -> None:
    engine = ScriptedEngine()
    check(tmp_path, [1, 2, 3], [4], engine=engine)
    assert [task.max_tokens for task in engine.seen] == [checking.GENERATED_TOKENS] * 3
    assert checking.GENERATED_TOKENS < 4


def test_the_run_is_open_again_afterwards(tmp_path: Path, asked: Any) -> None:
    engine = ScriptedEngine()
    check(tmp_path, [1, 2, 3], engine=engine)
    assert engine.location == StoreLocation(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
