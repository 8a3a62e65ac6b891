"""One damaged commit is damage of one unit: it is named, and the rest of the run stays readable."""

from __future__ import annotations

import numpy as np
import pytest

from store import keys
from store.array_reader import ReadOptions
from store.commit import read_commit
from store.errors import DamagedObject, RunError
from store.objects.local import LocalStore
from store.run import Run
from store.sealed_json import seal, unseal
from store.snapshot import find_committed, write_snapshot
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, capture, sample_units, write_run

SHAPE = SampleShape()
LENGTHS = [[3, 4], [5, 0], [6]]
WHOLE = ["stored", "failed"]
DAMAGED = keys.commit_key(1)


def cut_short(objects):
    data = objects.get(DAMAGED, max_bytes=1 << 20)
    objects.put(DAMAGED, [data[: len(data) // 2]])


def flipped(objects):
    data = bytearray(objects.get(DAMAGED, max_bytes=1 << 20))
    data[len(data) // 2] ^= 1
    objects.put(DAMAGED, [bytes(data)])


def resealed(**members):
    def change(objects):
        body = unseal(objects.get(DAMAGED, max_bytes=1 << 20), DAMAGED)
        body.update(members)
        objects.put(DAMAGED, [seal(body)])

    return change


def of_another_unit(objects):
    objects.put(DAMAGED, [objects.get(keys.commit_key(0), max_bytes=1 << 20)])


DAMAGE = {
    "cut short": cut_short,
    "a flipped bit": flipped,
    "another run's": resealed(run_id="f" * 16),
    "another unit's": of_another_unit,
    "of other prompts": resealed(first_prompt=0),
    "of prompts that the plan lacks": resealed(first_prompt=90),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_its_prompts_say_so_and_all_others_are_read(tmp_path, damage):
    objects = LocalStore(tmp_path)
    units = write_run(objects, SHAPE, LENGTHS)
    DAMAGE[damage](objects)

    run = Run(objects, ReadOptions())
    with pytest.warns(RuntimeWarning, match=r"1 of 3 committed units .* unit 1: .*00000001\.json"):
        table = run.prompts
    assert table["status"].to_pylist() == ["stored", "stored", "damaged", "damaged", "stored"]
    reasons = table["reason"].to_pylist()
    assert reasons[0] is reasons[4] is None
    assert all(DAMAGED in reason for reason in reasons[2:4])
    read = run.read("z", prompt="p4")
    assert np.array_equal(read.values, units[2].arrays["z"].swapaxes(1, 2))
    sound = run.where("status = 'stored'")
    assert sound == ["p0", "p1", "p4"]
    assert run.moments("z", prompts=sound).sizes["layer"] == 2
    assert run.sites == SHAPE.sites

    for call in (
        lambda: run.read("z", prompt="p2"),
        lambda: run.moments("z", prompts=["p0", "p2"]),
        lambda: run.batches(["z"]),
    ):
        with pytest.raises(RunError, match=r"unit 1\b|00000001\.json"):
            call()
    assert {(one.name, one.unit) for one in verify_run(objects).problems} == {(DAMAGED, 1)}


def test_what_the_run_says_of_itself_counts_it_apart(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SHAPE, LENGTHS)
    flipped(objects)
    run = Run(objects, ReadOptions())
    assert "3 of 5 stored (2 damaged)" in repr(run)
    assert "2 of 3 committed, 1 damaged: run `attnstore verify`" in repr(run)
    with pytest.warns(RuntimeWarning, match="unit 1"):
        assert run.sql("select unit from units order by 1")["unit"].to_pylist() == [0, 2]
    counts = "select count(*) as n from tokens group by prompt_id order by prompt_id"
    with pytest.warns(RuntimeWarning, match="unit 1"):
        assert run.sql(counts)["n"].to_pylist() == [3, 4, 5, 6]


def test_a_repair_or_the_commit_put_back_is_seen_by_a_refresh(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SHAPE, LENGTHS)
    whole = objects.get(DAMAGED, max_bytes=1 << 20)
    flipped(objects)
    run = Run(objects, ReadOptions())
    with pytest.warns(RuntimeWarning, match="unit 1"):
        assert "damaged" in run.prompts["status"].to_pylist()
    objects.put(DAMAGED, [whole])
    assert run.refresh().prompts["status"].to_pylist()[2:4] == WHOLE
    flipped(objects)
    assert capture(objects, SHAPE, sample_units(SHAPE, LENGTHS)[1], "a1", repair=1).won
    assert Run(objects, ReadOptions()).prompts["status"].to_pylist()[2:4] == WHOLE


def test_a_snapshot_has_no_row_of_it_and_later_ones_have(tmp_path):
    """Neither of it nor of the commit that it replaced: a repair's damage must not be hidden."""
    objects = LocalStore(tmp_path)
    units = write_run(objects, SHAPE, LENGTHS)
    write_snapshot(objects, RUN_ID)
    assert capture(objects, SHAPE, units[1], "a1", repair=1).won
    repaired = keys.commit_key(1, 1)
    whole = objects.get(repaired, max_bytes=1 << 20)
    objects.put(repaired, [whole[:99]])
    assert write_snapshot(objects, RUN_ID).units == 2
    found = find_committed(objects, RUN_ID)
    assert found.key(1) == repaired
    run = Run(objects, ReadOptions())
    with pytest.warns(RuntimeWarning, match=r"00000001\.r1\.json"):
        assert run.prompts["status"].to_pylist()[2:4] == ["damaged", "damaged"]
    with pytest.raises(DamagedObject):
        read_commit(objects, repaired)
    objects.put(repaired, [whole])
    assert write_snapshot(objects, RUN_ID).units == 3
    assert run.refresh().prompts["status"].to_pylist()[2:4] == WHOLE
