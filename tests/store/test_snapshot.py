"""Snapshots: the same rows as the commits say, at the cost of the newest folders only."""

from __future__ import annotations

import numpy as np
import pytest

from store import keys
from store.commit import begin_repair, commit_unit
from store.committed_units import COLUMNS, UnitRow
from store.objects.local import LocalStore
from store.run_format import Commit, Outcome, PromptOutcomes
from store.snapshot import (
    complete_folders,
    find_committed,
    snapshot_names,
    write_snapshot,
)
from tests.store.sample_run import RUN_ID, SampleShape, make_unit, write_run, write_unit


class CountingStore(LocalStore):
    """Counts reads of objects and how many names listings return."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.reads: list[str] = []
        self.listed = 0

    def get(self, name, *, max_bytes):
        self.reads.append(name)
        return super().get(name, max_bytes=max_bytes)

    def list(self, prefix, *, after=""):
        for info in super().list(prefix, after=after):
            self.listed += 1
            yield info


def small_commit(unit: int, *, repair: int = 0, failed: bool = False) -> Commit:
    """Return a commit without data, of one prompt."""
    return Commit(
        run_id=RUN_ID,
        unit=unit,
        attempt=f"a{repair}",
        repair=repair,
        first_prompt=unit,
        prompts=PromptOutcomes(
            outcome=[Outcome.FAILED],
            first_row=[0],
            num_rows=[0],
            first_position=[0],
            reasons={"0": "too long" if failed else "empty"},
        ),
        arrays=[],
        objects=[],
        ranks=[],
    )


def put_commits(objects: LocalStore, units: range) -> None:
    for unit in units:
        objects.put(keys.commit_key(unit), [small_commit(unit).to_bytes()])


def test_rows_equal_what_the_commits_say(tmp_path):
    objects = CountingStore(tmp_path)
    write_run(objects, SampleShape(), [[300, 0, 7], [1, 52], [9]])
    before = find_committed(objects, RUN_ID)
    assert before.snapshot is None
    before.load(objects, RUN_ID)
    manifest = write_snapshot(objects, RUN_ID)
    assert (manifest.units, manifest.complete_folders) == (3, 0)
    objects.reads.clear()
    found = find_committed(objects, RUN_ID)
    found.load(objects, RUN_ID)
    assert not [name for name in objects.reads if name.startswith("commits/")]
    for name in COLUMNS:
        assert found.table()[name].tolist() == before.table()[name].tolist()
    assert found.table()["rows"].tolist() == [307, 53, 9]
    assert found.table()["stored"].tolist() == [2, 2, 1]
    (missing,) = found.all_exceptions()
    assert (missing.prompt, missing.outcome, missing.reason) == (1, Outcome.FAILED, "empty prompt")
    assert found.key(2) == keys.commit_key(2)
    assert found.key(3) is None
    assert len(found) == 3


def test_only_commits_after_the_snapshot_are_read(tmp_path):
    objects = CountingStore(tmp_path)
    put_commits(objects, range(2500))
    manifest = write_snapshot(objects, RUN_ID)
    assert manifest.complete_folders == 2
    put_commits(objects, range(2500, 2510))
    objects.reads.clear()
    objects.listed = 0
    found = find_committed(objects, RUN_ID)
    found.load(objects, RUN_ID)
    read = [name for name in objects.reads if name.startswith("commits/")]
    assert sorted(read) == [keys.commit_key(unit) for unit in range(2500, 2510)]
    assert objects.listed < 520
    assert len(found) == 2510
    assert found.units().tolist() == list(range(2510))
    assert found.table()["failed"].sum() == 2510


def test_a_repair_inside_a_complete_folder_is_seen(tmp_path):
    objects = LocalStore(tmp_path)
    put_commits(objects, range(1000))
    write_snapshot(objects, RUN_ID)
    assert commit_unit(objects, small_commit(5, repair=1, failed=True)).won
    found = find_committed(objects, RUN_ID)
    assert found.key(5) == keys.commit_key(5, 1)
    assert len(found) == 1000
    found.load(objects, RUN_ID)
    assert found.table()["repair"].tolist() == [int(unit == 5) for unit in range(1000)]
    assert found.all_exceptions()[5].reason == "too long"
    write_snapshot(objects, RUN_ID)
    again = find_committed(objects, RUN_ID)
    assert (again.newer, again.key(5)) == ({}, keys.commit_key(5, 1))


def test_an_announced_repair_that_never_was_changes_nothing(tmp_path):
    objects = LocalStore(tmp_path)
    put_commits(objects, range(1000))
    write_snapshot(objects, RUN_ID)
    objects.put(keys.repair_mark(5, 1), [b""])
    found = find_committed(objects, RUN_ID)
    assert found.newer == {}
    assert found.key(5) == keys.commit_key(5)


@pytest.mark.parametrize("file", ["manifest.json", "units.parquet", "exceptions.parquet"])
def test_a_damaged_snapshot_is_passed_over(tmp_path, file):
    objects = LocalStore(tmp_path)
    put_commits(objects, range(30))
    first = write_snapshot(objects, RUN_ID)
    second = write_snapshot(objects, RUN_ID)
    assert snapshot_names(objects) == [first.name, second.name]
    path = tmp_path / "snapshots" / second.name / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    found = find_committed(objects, RUN_ID)
    assert found.snapshot == first.name
    assert len(found.damage) == 1
    assert len(found) == 30


def test_units_may_be_committed_in_any_order(tmp_path):
    objects, shape = LocalStore(tmp_path), SampleShape()
    for unit in (7, 2, 1005, 0):
        commit_unit(
            objects, write_unit(objects, shape, make_unit(shape, unit, 3 * unit, [4], 1), "a")
        )
        write_snapshot(objects, RUN_ID)
    assert find_committed(objects, RUN_ID).units().tolist() == [0, 2, 7, 1005]


def test_complete_folders_are_leading_ones():
    assert complete_folders(np.zeros(0, np.int64)) == 0
    assert complete_folders(np.arange(999)) == 0
    assert complete_folders(np.arange(1000)) == 1
    assert complete_folders(np.arange(1, 3000)) == 0
    assert complete_folders(np.delete(np.arange(3000), 1500)) == 1


def test_a_row_counts_outcomes():
    row = UnitRow.of(small_commit(3, failed=True))
    assert (row.stored, row.failed, row.skipped, row.num_prompts) == (0, 1, 0, 1)


def test_every_back_end_lists_what_comes_after(objects, monkeypatch):
    monkeypatch.setattr(keys, "UNITS_PER_FOLDER", 10)
    put_commits(objects, range(35))
    assert write_snapshot(objects, RUN_ID).complete_folders == 3
    put_commits(objects, range(35, 52))
    assert commit_unit(objects, small_commit(7, repair=1)).won
    found = find_committed(objects, RUN_ID)
    assert found.complete_folders == 3
    assert found.units().tolist() == list(range(52))
    assert sorted(found.newer) == [7, *range(35, 52)]
    assert found.key(7) == keys.commit_key(7, 1)
    assert write_snapshot(objects, RUN_ID).complete_folders == 5
    again = find_committed(objects, RUN_ID)
    assert (again.newer, len(again)) == ({}, 52)


def test_a_row_whose_commit_was_deleted_counts_no_longer(tmp_path):
    objects = CountingStore(tmp_path)
    put_commits(objects, range(4))
    write_snapshot(objects, RUN_ID)
    objects.delete(keys.commit_key(2))
    found = find_committed(objects, RUN_ID)
    assert found.units().tolist() == [0, 1, 3]
    assert found.key(2) is None
    found.load(objects, RUN_ID)
    assert found.table()["unit"].tolist() == [0, 1, 3]
    assert [one.prompt for one in found.all_exceptions()] == [0, 1, 3]
    assert found.lost == {2: 0}
    repair = begin_repair(objects, 2, named=found.repair(2))
    commit_unit(objects, small_commit(2, repair=repair))
    assert find_committed(objects, RUN_ID).newer == {2: 1}
