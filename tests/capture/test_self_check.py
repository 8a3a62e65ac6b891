"""The self-check measures a few prompts on the real engine, and stops what is not right."""

from __future__ import annotations

import pytest

from capture.same_rows import TOLERANCE
from capture.self_check import MIXED_TOLERANCE

pytestmark = pytest.mark.engine


def test_the_figures_are_those_of_float_noise(tiny_qwen3_1) -> None:
    figures, _ = tiny_qwen3_1["plain"].checks
    assert figures["prompts"] == 4
    assert figures["tokens"] == 33 + 1 + 48 + 8
    assert 0 <= figures["noise"] <= figures["batched"] < 1e-5
    assert 0 < figures["mixed"] < 1e-5
    assert "layer" in figures["batched_at"]
    assert 0 < figures["reference"] < 1e-5
    assert "head" in figures["reference_at"]


def test_sixteen_bits_have_a_bar_of_their_own(tiny_qwen3_1) -> None:
    figures, message = tiny_qwen3_1["bfloat16"].checks
    assert 1e-4 < figures["mixed"] < MIXED_TOLERANCE["bfloat16"]
    assert figures["batched"] < TOLERANCE["bfloat16"] == figures["tolerance"]
    assert figures["noise"] <= figures["batched"]
    assert "z is not the rebuilt pattern times v" in message
    assert "layer 1, head" in message


def test_a_run_that_continues_prompts_is_checked_by_their_own_rows(tiny_generated) -> None:
    captured = tiny_generated["greedy"]
    figures, message = captured.checks
    assert (figures["prompts"], figures["tokens"]) == (4, 33 + 1 + 48 + 8)
    assert max(figures["batched"], figures["mixed"], figures["reference"]) < 1e-5
    assert "z is not the rebuilt pattern times v" in message
    # Each of the two checks runs the prompts three times and two tokens more, one of them fed.
    own = sum(len(ids) + 5 for unit in captured.wanted.units for ids in unit)
    assert captured.staged_rows == [own + 2 * 3 * (90 + 4)]


def test_a_pattern_that_is_not_the_models_stops_the_run(tiny_qwen3_1) -> None:
    _, message = tiny_qwen3_1["plain"].checks
    assert "z is not the rebuilt pattern times v" in message
    assert "layer 1, head" in message


def test_the_run_itself_holds_nothing_of_the_check(tiny_qwen3_1) -> None:
    captured = tiny_qwen3_1["plain"]
    attempts = [commit.attempt for commit in map(captured.run._index.commit, range(3))]
    assert attempts == ["a0", "a1", "a2"]
