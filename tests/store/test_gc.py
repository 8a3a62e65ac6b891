"""gc removes what can never be committed, and nothing else."""

from __future__ import annotations

import os

import pytest

from store import keys
from store.commit import begin_repair, commit_unit
from store.errors import CommitRefused, DamagedObject, NotAFile
from store.gc import collect_garbage
from store.objects.local import LocalStore
from store.snapshot import snapshot_names, write_snapshot
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, capture, sample_units, write_run, write_unit

SHAPE = SampleShape()
LENGTHS = [[30, 5], [40]]


def names(objects):
    return {info.name for info in objects.list("")}


def test_only_attempts_that_lost_are_deleted_and_a_dry_run_deletes_nothing(objects):
    samples = write_run(objects, SHAPE, LENGTHS)
    before = names(objects)
    assert not capture(objects, SHAPE, samples[0], "lost").won
    write_unit(objects, SHAPE, sample_units(SHAPE, [*LENGTHS, [9]])[2], "running")
    running = {name for name in names(objects) if "/running/" in name}
    dry = collect_garbage(objects)
    assert [(one.unit, one.prefix) for one in dry.garbage] == [(0, "data/00000000/lost/")]
    assert dry.bytes > 0
    assert not dry.deleted
    assert len(names(objects)) > len(before | running)
    assert collect_garbage(objects, delete=True).garbage == dry.garbage
    assert names(objects) == before | running
    assert verify_run(objects, deep=True).ok
    assert collect_garbage(objects, delete=True).garbage == []


@pytest.mark.parametrize("delete", [False, True])
def test_a_link_in_place_of_temporary_files_is_refused_before_anything_is_deleted(tmp_path, delete):
    objects = LocalStore(tmp_path / "run")
    (sample, _) = write_run(objects, SHAPE, LENGTHS)
    assert not capture(objects, SHAPE, sample, "lost").won
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / ".tmp").rmdir()
    (tmp_path / "run" / ".tmp").symlink_to(tmp_path / "elsewhere")
    before = names(objects)
    with pytest.raises(NotAFile, match=r"\.tmp is a symbolic link"):
        collect_garbage(objects, delete=delete)
    assert names(objects) == before


def test_attempts_stay_while_a_repair_is_open(tmp_path):
    objects = LocalStore(tmp_path)
    samples = write_run(objects, SHAPE, LENGTHS)
    number = begin_repair(objects, 1)
    repaired = write_unit(objects, SHAPE, samples[1], "again", repair=number)
    assert collect_garbage(objects, delete=True).garbage == []
    assert commit_unit(objects, repaired).won
    assert [one.prefix for one in collect_garbage(objects, delete=True).garbage] == [
        "data/00000001/a0/"
    ]
    assert verify_run(objects, deep=True).ok


def test_a_slow_attempt_cannot_commit_what_was_deleted(tmp_path):
    objects = LocalStore(tmp_path)
    samples = write_run(objects, SHAPE, LENGTHS)
    slow = write_unit(objects, SHAPE, samples[0], "slow")
    collect_garbage(objects, delete=True)
    with pytest.raises(CommitRefused):
        commit_unit(objects, slow)
    assert verify_run(objects, deep=True).ok


def test_a_repair_that_begins_while_gc_looks_keeps_its_data(tmp_path):
    class Interrupted(LocalStore):
        """Lets a repair begin and write right before data is listed."""

        def list(self, prefix, *, after=""):
            if prefix == keys.DATA and not repairs:
                number = begin_repair(inner, 1)
                repairs.append(write_unit(inner, SHAPE, samples[1], "again", repair=number))
            return super().list(prefix, after=after)

    inner, repairs = LocalStore(tmp_path), []
    samples = write_run(inner, SHAPE, LENGTHS)
    assert collect_garbage(Interrupted(tmp_path), delete=True).garbage == []
    assert commit_unit(inner, repairs[0]).won
    assert verify_run(inner, deep=True).ok


def test_an_unreadable_commit_stops_gc(tmp_path):
    objects = LocalStore(tmp_path)
    samples = write_run(objects, SHAPE, LENGTHS)
    capture(objects, SHAPE, samples[0], "lost")
    path = tmp_path / keys.commit_key(0)
    path.write_bytes(path.read_bytes()[:-9])
    before = names(objects)
    with pytest.raises(DamagedObject):
        collect_garbage(objects, delete=True)
    assert names(objects) == before


def test_old_snapshots_and_stale_temporaries_go(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SHAPE, LENGTHS)
    kept = [write_snapshot(objects, RUN_ID).name for _ in range(4)][-2:]
    for age in (0, 2 * 24 * 3600):
        path = tmp_path / ".tmp" / f"of-age-{age}"
        path.write_bytes(b"x")
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    report = collect_garbage(objects, delete=True)
    assert report.temporary_files == 1
    assert (tmp_path / ".tmp" / "of-age-0").exists()
    assert not (tmp_path / ".tmp" / "of-age-172800").exists()
    assert snapshot_names(objects) == kept
    assert verify_run(objects, deep=True).ok
