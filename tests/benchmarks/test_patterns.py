"""The benchmark of stored patterns makes every entry, and says what each prompt took."""

from __future__ import annotations

import json

import pytest

from benchmarks import patterns


def test_every_shape_and_length_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patterns, "LENGTHS", (3, 40))
    monkeypatch.setattr("sys.argv", ["patterns", "--json", "--rounds", "1", "--tokens", "200"])
    patterns.main()
    figures = json.loads(capsys.readouterr().out)
    for shape in patterns.SHAPES:
        of_3, of_40, mixed = (figures[shape][label] for label in ("3", "40", patterns.MIXED))
        assert (of_3["prompts"], of_3["entries"]) == (66, 66 * 6)
        assert (of_40["prompts"], of_40["entries"]) == (5, 5 * 820)
        assert mixed["prompts"] == 4
        assert min(one["making_microseconds_a_prompt"] for one in (of_3, of_40, mixed)) > 0


def test_a_step_ends_before_it_has_too_many_tokens_or_prompts() -> None:
    assert patterns.steps([8] * 1100) == [512, 512, 76]
    assert patterns.steps([5000, 3192, 1, 9000, 2]) == [2, 1, 1, 1]
