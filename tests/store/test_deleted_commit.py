"""A unit whose commit was deleted is pending: it is captured again, and ends verified."""

from __future__ import annotations

import numpy as np
import pytest

from store import keys
from store.array_reader import ReadOptions
from store.commit import begin_repair, commit_unit, committed_units
from store.errors import PromptNotStored
from store.gc import collect_garbage
from store.run import Run
from store.snapshot import find_committed, write_snapshot
from store.verify import verify_run
from tests.store.committed_values import assert_same_values, committed_values
from tests.store.sample_run import RUN_ID, SampleShape, capture, sample_units, write_run, write_unit

SHAPE = SampleShape(dtype="bfloat16", ranks=2)
LENGTHS = [[30, 0, 7], [9]]


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_resume_captures_the_unit_again(objects, with_snapshot):
    write_run(objects, SHAPE, LENGTHS)
    if with_snapshot:
        write_snapshot(objects, RUN_ID)
    objects.delete(keys.commit_key(0))

    found = find_committed(objects, RUN_ID)
    assert found.units().tolist() == [1]
    run = Run(objects, ReadOptions())
    with pytest.raises(PromptNotStored, match="pending"):
        run.read("z", prompt="p0")
    assert run.read("z", prompt="p3").sizes["pos"] == 9
    assert run.prompts["status"].to_pylist() == ["pending"] * 3 + ["stored"]
    assert verify_run(objects, deep=True).ok != with_snapshot
    assert collect_garbage(objects).garbage == []

    again = sample_units(SHAPE, LENGTHS, seed=8)[0]
    repair = begin_repair(objects, 0, named=found.repair(0)) if with_snapshot else 0
    assert capture(objects, SHAPE, again, "a1", repair=repair).won
    assert_same_values(committed_values(objects, committed_units(objects)[0]), again.arrays)
    read = run.refresh().read("z", prompt="p2")
    assert np.array_equal(read.values, again.arrays["z"][:, 30:].swapaxes(1, 2))
    assert verify_run(objects, deep=True).problems == []
    (garbage,) = collect_garbage(objects, delete=True).garbage
    assert garbage.prefix == "data/00000000/a0/"
    assert verify_run(objects, deep=True).problems == []


def test_the_attempt_whose_commit_was_deleted_may_commit_again(objects):
    units = write_run(objects, SHAPE, LENGTHS)
    commit = write_unit(objects, SHAPE, units[0], "a0")
    objects.delete(keys.commit_key(0))
    assert commit_unit(objects, commit).won
    assert verify_run(objects, deep=True).problems == []
    assert_same_values(committed_values(objects, keys.commit_key(0)), units[0].arrays)


def test_a_repair_whose_commit_was_deleted_never_gives_back_what_it_replaced(objects):
    write_run(objects, SHAPE, LENGTHS)
    repaired, again = (sample_units(SHAPE, LENGTHS, seed=seed)[0] for seed in (8, 9))
    assert capture(objects, SHAPE, repaired, "a1", repair=begin_repair(objects, 0)).won
    write_snapshot(objects, RUN_ID)
    objects.delete(keys.commit_key(0, 1))

    found = find_committed(objects, RUN_ID)
    assert (found.units().tolist(), found.lost) == ([1], {0: 1})
    run = Run(objects, ReadOptions())
    with pytest.raises(PromptNotStored, match="pending"):
        run.read("z", prompt="p0")
    (problem,) = verify_run(objects).problems
    assert (problem.name, problem.unit) == (keys.commit_key(0, 1), 0)
    assert collect_garbage(objects).garbage == []

    repair = begin_repair(objects, 0, named=found.repair(0))
    assert repair == 2
    assert capture(objects, SHAPE, again, "a2", repair=repair).won
    read = run.refresh().read("z", prompt="p2")
    assert np.array_equal(read.values, again.arrays["z"][:, 30:].swapaxes(1, 2))
    assert verify_run(objects, deep=True).problems == []
