"""Writers of one plan segment: neither writes the other's files, and gc removes the loser's."""

from __future__ import annotations

import pytest

from store import keys, open_run
from store.errors import DamagedObject, FormatError
from store.gc import collect_garbage
from store.objects.local import LocalStore
from store.plan import FIRST_MANIFEST, read_prompts, read_segments
from store.plan_writer import SegmentWriter
from store.remains import find_remains
from store.snapshot import write_snapshot
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, plan_tables, write_run

LENGTHS = [[3, 4], [6]]


def test_the_loser_of_a_segment_leaves_the_winners_files_as_they_are(tmp_path):
    objects = LocalStore(tmp_path)
    ours, theirs = plan_tables(LENGTHS), plan_tables([[5, 1, 1]])
    slow = SegmentWriter(objects, run_id=RUN_ID, segment=0)
    slow.add_prompts(theirs["prompts"])
    quick = SegmentWriter(objects, run_id=RUN_ID, segment=0)
    quick.add_prompts(ours["prompts"])
    manifest = quick.finish(ours["units"])
    with pytest.raises(FormatError, match="another driver at the same time"):
        slow.finish(theirs["units"])
    assert read_segments(objects) == [manifest]
    assert read_prompts(objects, manifest).equals(ours["prompts"])


def test_gc_removes_plan_files_that_the_manifest_does_not_name(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), LENGTHS)
    before = {info.name for info in objects.list("")}
    for segment in (0, 1):
        late = SegmentWriter(objects, run_id=RUN_ID, segment=segment)
        late.add_prompts(plan_tables([[5]])["prompts"])
    added = {info.name for info in objects.list(keys.PLAN)} - before
    lost = {name for name in added if name.startswith(keys.plan_prefix(0))}
    assert (len(added), len(lost)) == (2, 1)
    assert {one.prefix for one in collect_garbage(objects).garbage} == lost
    collect_garbage(objects, delete=True)
    assert {info.name for info in objects.list("")} == before | (added - lost)
    assert verify_run(objects, deep=True).ok


def test_a_plan_without_its_first_segment_is_damage(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), LENGTHS)
    one = SegmentWriter(objects, run_id=RUN_ID, segment=1)
    tables = plan_tables([[5]])
    one.add_prompts(tables["prompts"])
    units = tables["units"].to_pydict() | {"unit": [2], "first_prompt": [3]}
    one.finish(tables["units"].from_pydict(units, schema=tables["units"].schema))
    assert len(read_segments(objects)) == 2
    objects.delete("plan/0000/manifest.json")
    with pytest.raises(DamagedObject, match=r"plan/0000/manifest\.json is missing"):
        read_segments(objects)
    with pytest.raises(DamagedObject, match=r"plan/0000/manifest\.json is missing"):
        open_run(objects.url)
    assert not verify_run(objects).ok


def test_remains_are_found_from_a_unit_on(tmp_path):
    objects = LocalStore(tmp_path)
    assert find_remains(objects, 0) is None
    write_run(objects, SampleShape(), LENGTHS)
    assert find_remains(objects, 0) in {keys.commit_key(0), keys.commit_key(1)}
    assert find_remains(objects, 1) == keys.commit_key(1)
    assert find_remains(objects, 2) is None
    objects.put("data/00000002/a0/zarr.json", [b"{}"])
    assert find_remains(objects, 2) == "data/00000002/a0/zarr.json"
    assert find_remains(objects, 3) is None
    objects.put(keys.commit_key(2001), [b"{}"])
    assert find_remains(objects, 1500) == keys.commit_key(2001)
    assert find_remains(objects, 2002) is None
    objects.put(keys.repair_mark(7000, 1), [b""])
    assert find_remains(objects, 2002) == keys.repair_mark(7000, 1)


@pytest.mark.parametrize("kept", [keys.MODEL, keys.SNAPSHOTS])
def test_a_model_or_a_snapshot_remains_of_a_run(tmp_path, kept):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), LENGTHS)
    write_snapshot(objects, RUN_ID)
    for info in list(objects.list("")):
        if not info.name.startswith(kept):
            objects.delete(info.name)
    assert (find_remains(objects, 0) or "").startswith(kept)
    assert find_remains(objects, 1) is None


def test_a_plan_that_is_lost_under_its_commits_is_one_problem_and_no_empty_run(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), LENGTHS)
    opened = open_run(objects.url)
    objects.delete(FIRST_MANIFEST)
    for call in (lambda: open_run(objects.url), opened.refresh):
        with pytest.raises(DamagedObject, match="is missing, though units are committed"):
            call()
    for deep in (False, True):
        (problem,) = verify_run(objects, deep=deep).problems
        assert problem.name == FIRST_MANIFEST
    assert opened.read("z", prompt=0).sizes["pos"] == 3
