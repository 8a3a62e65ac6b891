"""A snapshot of another run is passed over: what the commits say counts, for every reader."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from jobs.prepare import PreparedRun, missing_units, read_manifest
from jobs.status import read_status
from store import keys, open_run
from store.errors import FormatError
from store.objects.local import LocalStore
from store.plan import read_segments
from store.run_format import SnapshotManifest
from store.sealed_json import MAX_JSON_BYTES
from store.snapshot import LATEST, find_committed, write_snapshot
from store.verify import verify_run
from tests.store import sample_run
from tests.store.sample_run import SampleShape, capture, make_unit, write_manifests

LENGTHS = [[9, 3], [5, 5, 5, 5]]
OURS, OTHER = "a" * 16, "b" * 16


def write(folder: Path, patch: pytest.MonkeyPatch, run_id: str, *, failed: int) -> LocalStore:
    """Write a run of the same prompts, of whose second unit one prompt failed."""
    patch.setattr(sample_run, "RUN_ID", run_id)
    objects, shape = LocalStore(folder), SampleShape()
    write_manifests(objects, shape, LENGTHS)
    for unit, lengths in enumerate(LENGTHS):
        kept = [0 if (unit, i) == (1, failed) else n for i, n in enumerate(lengths)]
        capture(objects, shape, make_unit(shape, unit, 2 * unit, kept, 7))
    return objects


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run into which the snapshots of another one were copied, newer than its own."""
    other = write(tmp_path / "other", monkeypatch, OTHER, failed=2)
    write_snapshot(other, OTHER)
    ours = write(tmp_path / "ours", monkeypatch, OURS, failed=1)
    shutil.copytree(tmp_path / "other/snapshots", tmp_path / "ours/snapshots")
    return ours


def prepared(objects: LocalStore) -> PreparedRun:
    return PreparedRun(read_manifest(objects), read_segments(objects))


def test_readers_say_what_the_commits_say(run):
    opened = open_run(run.url)
    states = opened.prompts["status"].to_pylist()
    assert states == ["stored"] * 3 + ["failed"] + ["stored"] * 2
    assert {int(p) for batch in opened.batches(["z"]) for p in batch.prompt} == {0, 1, 2, 4, 5}
    found = find_committed(run, OURS)
    assert found.snapshot is None
    assert OTHER in found.damage[0]


def test_an_own_snapshot_before_it_is_still_used(run, tmp_path):
    shutil.move(tmp_path / "ours/snapshots", tmp_path / "kept")
    own = write_snapshot(run, OURS)
    shutil.copytree(tmp_path / "kept", tmp_path / "ours/snapshots", dirs_exist_ok=True)
    assert find_committed(run, OURS).snapshot == own.name


def test_verify_names_it_and_the_latest_one(run):
    assert {LATEST} < {problem.name for problem in verify_run(run).problems}
    manifest = SnapshotManifest.from_bytes(run.get(LATEST, max_bytes=MAX_JSON_BYTES), LATEST)
    assert f"{keys.SNAPSHOTS}{manifest.name}/" in {p.name for p in verify_run(run).problems}


def test_complete_folders_of_another_run_commit_nothing(run, monkeypatch, tmp_path):
    monkeypatch.setattr(keys, "UNITS_PER_FOLDER", 2)
    shutil.rmtree(tmp_path / "ours/snapshots")
    for info in list(run.list(keys.COMMITS)):
        run.delete(info.name)
    other = LocalStore(tmp_path / "other")
    assert write_snapshot(other, OTHER).complete_folders == 1
    shutil.copytree(tmp_path / "other/snapshots", tmp_path / "ours/snapshots")
    assert missing_units(run, prepared(run)).tolist() == [0, 1]
    assert read_status(run).units_committed == 0
    assert set(open_run(run.url).prompts["status"].to_pylist()) == {"pending"}


def test_where_nothing_can_be_listed_it_is_refused(run, monkeypatch):
    from store.errors import CannotList

    def cannot(*_args, **_named):
        raise CannotList("by name only")

    monkeypatch.setattr(run, "list", cannot)
    with pytest.raises(FormatError, match=f"belongs to run {OTHER}"):
        find_committed(run, OURS)


def test_status_counts_the_commits(run):
    status = read_status(run)
    assert (status.units_committed, status.prompts_stored, status.prompts_failed) == (2, 5, 1)
    assert np.asarray(missing_units(run, prepared(run))).size == 0


def test_a_commit_of_another_run_counts_for_nobody(tmp_path, monkeypatch):
    write(tmp_path / "other", monkeypatch, OTHER, failed=2)
    ours = write(tmp_path / "ours", monkeypatch, OURS, failed=1)
    key = keys.commit_key(1, 0)
    shutil.copy(tmp_path / "other" / key, tmp_path / "ours" / key)
    message = f"{key} belongs to run {OTHER}"
    with pytest.warns(RuntimeWarning, match=message):
        states = open_run(ours.url).prompts["status"].to_pylist()
    assert states[-1] == "damaged"
    status = read_status(ours)
    assert (status.units_committed, status.complete) == (1, False)
    assert message in (status.damage() or "")
    assert write_snapshot(ours, OURS).units == 1
