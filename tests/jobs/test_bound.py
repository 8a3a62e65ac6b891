"""Which stage bounds a run, from the seconds of each."""

from __future__ import annotations

import pytest

from jobs.bound import find_bound


@pytest.mark.parametrize(
    ("seconds", "stage"),
    [
        ({"copy": 1.0, "encode": 2.0, "put": 3.0}, "engine"),
        ({"copy": 1.0, "encode": 2.0, "put": 15.0}, "put"),
        ({"copy": 1.0, "encode": 14.0, "put": 3.0}, "encode"),
        ({"encode": 9.0, "put": 9.5}, "put"),
    ],
)
def test_the_busiest_stage_bounds_a_run_whose_writers_never_rest(
    seconds: dict[str, float], stage: str
) -> None:
    bound = find_bound(seconds, worker_seconds=10.0, threads_per_worker=2)
    assert bound is not None
    assert bound.stage == stage
    assert bound.busy["put"] == pytest.approx(seconds["put"] / 20)
    assert bound.advice in bound.sentence()


def test_nothing_measured_bounds_nothing() -> None:
    assert find_bound({}, 10.0, 2) is None
    assert find_bound({"put": 1.0}, 0.0, 2) is None
