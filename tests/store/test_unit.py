"""A unit from arrays to commit and back, and what verify says of damage to it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

import store.zarr_bfloat16  # noqa: F401
from store import keys
from store.codec import Codec
from store.commit import begin_repair, commit_unit, committed_units, read_commit
from store.errors import CommitRefused, DamagedObject, FormatError, ObjectNotFound, UnitNotFound
from store.objects.local import LocalStore
from store.plan import read_prompts, read_segments, read_units
from store.plan_writer import write_segment
from store.verify import verify_run
from tests.store.sample_run import (
    RUN_ID,
    SampleShape,
    capture,
    make_unit,
    plan_file,
    plan_tables,
    write_manifests,
    write_run,
    write_unit,
)

LENGTHS = [[300, 0, 7], [1, 520]]


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_zarr_python_reads_equal_bits(tmp_path, dtype, codec):
    shape = SampleShape(dtype=dtype, codec=codec)
    samples = write_run(LocalStore(tmp_path), shape, LENGTHS)
    for sample in samples:
        group = zarr.open_group(tmp_path / keys.attempt_prefix(sample.unit, "a0"), mode="r")
        assert group.attrs["unit"] == sample.unit
        for site, truth in sample.arrays.items():
            array = group[site]
            assert array.metadata.dimension_names[1] == "token"
            assert array.attrs["heads"] == list(range(truth.shape[2]))
            assert array[:].tobytes() == truth.tobytes()
    assert verify_run(LocalStore(tmp_path), deep=True).problems == []


def test_a_missing_shard_shows_as_nan_to_zarr_python(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(dtype="bfloat16"), LENGTHS)
    prefix = keys.attempt_prefix(0, "a0")
    objects.delete(prefix + "z/c/1/0/0/0")
    values = zarr.open_group(tmp_path / prefix, mode="r")["z"][1].astype(np.float32)
    assert np.isnan(values).any()
    assert not np.isnan(
        zarr.open_group(tmp_path / prefix, mode="r")["z"][0].astype(np.float32)
    ).any()


def test_exactly_one_attempt_holds_a_unit(tmp_path):
    objects, shape = LocalStore(tmp_path), SampleShape()
    sample = make_unit(shape, 3, 0, [10], seed=1)
    commit = write_unit(objects, shape, sample, "first")
    assert commit_unit(objects, commit).won
    again = commit_unit(objects, commit)
    assert again.won
    assert again.attempt == "first"
    late = capture(objects, shape, sample, "late")
    assert not late.won
    assert late.attempt == "first"
    assert committed_units(objects) == {3: keys.commit_key(3)}


def test_the_highest_repair_counts(tmp_path):
    objects, shape = LocalStore(tmp_path), SampleShape()
    sample = make_unit(shape, 3, 0, [10], seed=1)
    with pytest.raises(UnitNotFound, match="3"):
        begin_repair(objects, 3)
    capture(objects, shape, sample, "a")
    assert begin_repair(objects, 3) == 1
    capture(objects, shape, sample, "b", repair=1)
    assert begin_repair(objects, 3) == 2
    assert committed_units(objects) == {3: keys.commit_key(3, 1)}
    assert read_commit(objects, keys.commit_key(3, 1)).attempt == "b"


@pytest.mark.parametrize("damage", ["gone", "short", "rows", "unlisted", "reason", "metadata"])
def test_an_incomplete_attempt_is_refused(tmp_path, damage):
    objects, shape = LocalStore(tmp_path), SampleShape()
    commit = write_unit(objects, shape, make_unit(shape, 0, 0, [300, 0], seed=1), "a")
    prompts = commit.prompts
    shard = keys.attempt_prefix(0, "a") + "v/c/0/0/0/0"
    if damage == "gone":
        objects.delete(shard)
    elif damage == "short":
        objects.put(shard, [b"x" * 10])
    elif damage == "rows":
        prompts = prompts.model_copy(update={"num_rows": [299, 0]})
    elif damage == "metadata":
        records = [record for record in commit.objects if record.name != "v/zarr.json"]
        commit = commit.model_copy(update={"objects": records})
    elif damage == "reason":
        prompts = prompts.model_copy(update={"reasons": {}})
    else:
        records = [record for record in commit.objects if not record.name.startswith("v/c/1")]
        commit = commit.model_copy(update={"objects": records})
    with pytest.raises(CommitRefused, match="unit 0"):
        commit_unit(objects, commit.model_copy(update={"prompts": prompts}))
    assert committed_units(objects) == {}


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "deep_only"),
    [
        ("data/00000001/a0/v/c/1/0/0/0", True),
        ("data/00000001/a0/v/zarr.json", True),
        ("plan/0000/prompts-*.parquet", True),
        ("commits/000000/00000001.json", False),
        ("plan/0000/manifest.json", False),
        ("run.json", False),
        ("model.json", False),
    ],
)
def test_verify_lists_damage_and_never_raises(tmp_path, name, deep_only):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), LENGTHS)
    (path,) = tmp_path.glob(name)
    original = path.read_bytes()

    _flip(path, len(original) // 2)
    assert verify_run(objects).ok == deep_only
    report = verify_run(objects, deep=True)
    assert len(report.problems) >= 1
    assert report.damaged_units == ([1] if "00000001" in name else [])

    path.write_bytes(original[:-5])
    assert not verify_run(objects).ok
    path.unlink()
    # A commit or plan that never was is not damage to what is there.
    if not name.startswith(("commits", "plan/0000/manifest", "model")):
        assert not verify_run(objects).ok
    path.write_bytes(original)
    assert verify_run(objects, deep=True).ok


def test_a_commit_of_other_prompts_than_planned_is_found(tmp_path):
    objects, shape = LocalStore(tmp_path), SampleShape()
    write_manifests(objects, shape, LENGTHS)
    capture(objects, shape, make_unit(shape, 0, 0, [300, 0], seed=1))
    capture(objects, shape, make_unit(shape, 1, 4, [1, 520], seed=1))
    capture(objects, shape, make_unit(shape, 2, 5, [3], seed=1))
    messages = {problem.unit: problem.message for problem in verify_run(objects).problems}
    assert messages == {
        0: "covers 2 prompts from 0, the plan's unit has 3 from 0",
        1: "covers 2 prompts from 4, the plan's unit has 2 from 3",
        None: "is missing, though unit 2 is committed, beyond the 2 units that are planned; "
        "restore it from a copy",
    }


@pytest.mark.parametrize(
    "change",
    [{"shape": [1, 1, 1, 1]}, {"data_type": "float64"}, {"codecs": []}, {"node_type": "group"}],
)
def test_zarr_metadata_that_contradicts_its_commit_is_found(tmp_path, change, monkeypatch):
    from store import attempt

    real = attempt.array_metadata

    def wrong(record, **members):
        document = json.loads(real(record, **members))
        return json.dumps(document | (change if record.site == "v" else {})).encode()

    monkeypatch.setattr(attempt, "array_metadata", wrong)
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), LENGTHS)
    assert verify_run(objects).ok
    problems = verify_run(objects, deep=True).problems
    assert [problem.name for problem in problems] == [
        f"data/0000000{unit}/a0/v/zarr.json" for unit in (0, 1)
    ]
    assert next(iter(change)) in problems[0].message


def test_two_shards_exchanged_are_found(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), LENGTHS)
    one, other = (tmp_path / f"data/00000000/a0/z/c/{layer}/0/0/0" for layer in (0, 1))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    assert len(verify_run(objects, deep=True).problems) == 2


def test_a_plan_is_read_back_as_written(tmp_path):
    objects = LocalStore(tmp_path)
    tables = plan_tables(LENGTHS)
    manifest = write_segment(objects, run_id=RUN_ID, segment=0, **tables)
    assert write_segment(objects, run_id=RUN_ID, segment=0, **tables) == manifest
    assert read_segments(objects) == [manifest]
    assert read_prompts(objects, manifest).equals(tables["prompts"])
    assert read_units(objects, manifest).equals(tables["units"])
    assert read_prompts(objects, manifest, ["prompt_id"]).column_names == ["prompt_id"]
    with pytest.raises(FormatError, match="another plan"):
        write_segment(objects, run_id=RUN_ID, segment=0, **plan_tables([[5]]))


def test_a_plan_that_does_not_add_up_is_refused(tmp_path):
    objects = LocalStore(tmp_path)
    tables = plan_tables(LENGTHS)
    with pytest.raises(FormatError, match="cover"):
        write_segment(
            objects,
            run_id=RUN_ID,
            segment=0,
            prompts=tables["prompts"].slice(1),
            units=tables["units"],
        )
    manifest = write_segment(objects, run_id=RUN_ID, segment=0, **tables)
    objects.delete(plan_file(objects, "prompts"))
    with pytest.raises(DamagedObject, match="missing"):
        read_prompts(objects, manifest)
    objects.delete("plan/0000/manifest.json")
    assert read_segments(objects) == []
    with pytest.raises(ObjectNotFound):
        objects.get("plan/0000/manifest.json", max_bytes=1000)
