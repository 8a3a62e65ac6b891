"""Which stage bounds a run, from the seconds of each."""

from __future__ import annotations

import json

import pytest

from jobs.bound import find_bound
from jobs.status import read_status
from store.commit import commit_unit
from store.objects.open import open_store
from tests.store.sample_run import SampleShape, make_unit, write_manifests, write_unit

COMPUTING = {"engine": 9.0, "wait": 0.5, "idle": 0.1}
WAITING = {"engine": 3.0, "wait": 6.0, "idle": 1.0}


@pytest.mark.parametrize(
    ("seconds", "stage", "advice"),
    [
        ({**COMPUTING, "put": 30.0}, "engine", "more workers"),
        ({**WAITING, "copy": 1.0, "encode": 2.0, "put": 15.0}, "put", "a faster store"),
        ({**WAITING, "copy": 1.0, "encode": 14.0, "put": 3.0}, "encode", "codec raw"),
        ({**WAITING, "copy": 4.0, "encode": 1.0, "put": 3.0}, "copy", "fewer sites"),
        ({**WAITING, "put": 1.0, "commit": 3.0}, "commit", "larger units"),
        ({"engine": 3.0, "wait": 1.0, "idle": 6.0, "put": 9.0}, "idle", "more units in flight"),
        ({"engine": 3.0, "wait": 6.0}, "engine", "more workers"),
    ],
)
def test_engines_that_waited_for_storing_are_bound_by_its_longest_stage(
    seconds: dict[str, float], stage: str, advice: str
) -> None:
    bound = find_bound(seconds)
    assert bound is not None
    assert bound.stage == stage
    assert advice in bound.advice
    assert bound.advice in bound.sentence()
    assert sum(bound.engines.values()) == pytest.approx(1)
    assert sum(bound.storing.values()) == pytest.approx(1 if len(seconds) > 3 else 0)
    assert json.loads(json.dumps(bound.as_json()))["stage"] == stage


def test_nothing_measured_bounds_nothing() -> None:
    assert find_bound({}) is None
    assert find_bound({"put": 1.0}) is None


def test_status_says_it_of_the_last_units_and_nothing_where_commits_do_not_tell(tmp_path) -> None:
    objects, shape = open_store(str(tmp_path)), SampleShape()

    write_manifests(objects, shape, [[3]] * 20)

    def commit(unit: int, timings: dict[str, float]) -> None:
        written = write_unit(objects, shape, make_unit(shape, unit, unit, [3], 0), "a")
        commit_unit(objects, written.model_copy(update={"timings": timings}))

    commit(0, {})
    assert read_status(objects).bound is None
    assert "bound" not in read_status(objects).as_json()
    for unit in range(1, 4):
        commit(unit, {**WAITING, "put": 10.0})
    assert read_status(objects).as_json()["bound"]["stage"] == "put"
    for unit in range(4, 20):
        commit(unit, {**COMPUTING, "put": 10.0})
    assert read_status(objects).as_json()["bound"]["stage"] == "engine"
