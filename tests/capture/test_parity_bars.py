"""The bars of `benchmarks/parity.py`: what noise passes and what a wrong head does to them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.parity import Worst

LAYERS, HEADS = 2, 4
NUMBERS = [4, 7]
"""Of the layers in the model."""


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
    assert _worst(_layers(noise, seed=1), noise).failures(dtype, NUMBERS) == []


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_two_heads_that_changed_places_fail_by_name(dtype: str, noise: float) -> None:
    stored = _layers(noise, seed=1)
    stored[1]["z"][[0, 2]] = stored[1]["z"][[2, 0]]
    failures = _worst(stored, noise).failures(dtype, NUMBERS)
    named = {line.split(":")[0] for line in failures}
    assert named == {"z, layer 7, head 0", "z, layer 7, head 2"}


def test_one_wrong_row_of_one_prompt_is_kept_among_right_ones() -> None:
    worst = _worst(_layers(0.0), 1e-4)
    stored = _layers(0.0, tokens=16)
    stored[0]["z"][3, 5] = stored[0]["z"][3, 6]
    worst.add(worst.stored, stored, _layers(0.0))
    worst.add(worst.stored, _layers(0.0), _layers(0.0))
    assert [line.split(":")[0] for line in worst.failures("float32", NUMBERS)] == [
        "z, layer 4, head 3"
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_value_that_is_no_number_fails(dtype: str) -> None:
    stored = _layers(0.0, tokens=400)
    stored[0]["z"][1, 0, 0] = np.nan
    worst = Worst()
    worst.add(worst.stored, stored, _layers(0.0, tokens=400))
    worst.add(worst.eager, _layers(0.0, tokens=400), _layers(0.0, tokens=400))
    named = {line.split(":")[0] for line in worst.failures(dtype, NUMBERS)}
    assert named == {"z, layer 4, head 1"}


@pytest.mark.parametrize("wrong", [2, 20])
def test_bfloat16_leaves_out_one_row_in_a_hundred_and_no_more(wrong: int) -> None:
    stored = _layers(3e-2, seed=1, tokens=400)
    stored[1]["z"][2, :wrong] += 3.0
    worst = Worst()
    worst.add(worst.stored, stored, _layers(0.0, tokens=400))
    worst.add(worst.eager, _layers(3e-2, seed=2, tokens=400), _layers(0.0, tokens=400))
    named = [line.split(":")[0] for line in worst.failures("bfloat16", NUMBERS)]
    assert named == ([] if wrong == 2 else ["z, layer 7, head 2"])


@pytest.mark.parametrize(("dtype", "off"), [("float32", 2e-3), ("bfloat16", 1e-2)])
def test_a_pattern_that_does_not_give_z_fails(dtype: str, off: float) -> None:
    worst = _worst(_layers(0.0), 1e-4)
    worst.mixed = off
    assert [line.split()[0] for line in worst.failures(dtype, NUMBERS)] == ["pattern"]
