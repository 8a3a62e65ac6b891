"""The bars of `benchmarks/parity.py`: what noise passes and what a wrong head does to them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.parity import Worst

LAYERS, HEADS = 2, 4


def _layers(noise: float, seed: int = 0, tokens: int = 16) -> list[dict[str, np.ndarray]]:
    truth = np.random.default_rng(7).standard_normal((LAYERS, HEADS, tokens, 8))
    off = noise * np.random.default_rng(seed).uniform(-1, 1, truth.shape)
    return [{"z": layer.astype(np.float32)} for layer in truth + off]


def _worst(stored: list[dict[str, np.ndarray]], eager_noise: float) -> Worst:
    worst = Worst()
    worst.add(worst.stored, stored, _layers(0.0))
    worst.add(worst.eager, _layers(eager_noise, seed=2), _layers(0.0))
    return worst


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_the_models_own_noise_passes(dtype: str, noise: float) -> None:
    assert _worst(_layers(noise, seed=1), noise).failures(dtype) == []


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_two_heads_that_changed_places_fail_by_name(dtype: str, noise: float) -> None:
    stored = _layers(noise, seed=1)
    stored[1]["z"][[0, 2]] = stored[1]["z"][[2, 0]]
    failures = _worst(stored, noise).failures(dtype)
    assert [line.split(":")[0] for line in failures] == ["z, layer 1, head 0", "z, layer 1, head 2"]


def test_one_wrong_row_of_one_prompt_is_kept_among_right_ones() -> None:
    worst = _worst(_layers(0.0), 1e-4)
    stored = _layers(0.0, tokens=16)
    stored[0]["z"][3, 5] = stored[0]["z"][3, 6]
    worst.add(worst.stored, stored, _layers(0.0))
    worst.add(worst.stored, _layers(0.0), _layers(0.0))
    assert [line.split(":")[0] for line in worst.failures("float32")] == ["z, layer 0, head 3"]


def test_a_value_that_is_no_number_fails() -> None:
    stored = _layers(0.0)
    stored[0]["z"][1, 0, 0] = np.nan
    assert len(_worst(stored, 1e-4).failures("float32")) == 1
