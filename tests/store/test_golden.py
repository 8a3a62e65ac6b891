"""Runs of format version 1, written once and kept: every later version reads them to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from store import keys, open_run
from store.checksum import crc32c, hex_crc32c
from store.commit import committed_units
from store.errors import FormatError
from store.objects.local import LocalStore
from store.run_format import Commit
from store.snapshot import find_committed
from store.verify import verify_run
from tests.store.committed_values import committed_values
from tests.store.sample_run import RUN_ID

GOLDEN = Path(__file__).parent / "golden" / "v1"
WITHOUT_TAGS = ["float32-raw", "bfloat16-raw", "bfloat16-fast", "float16-small"]
WITH_TAGS = ["bfloat16-raw-tags", "float16-fast-tags", "float32-small-tags"]
KINDS = WITHOUT_TAGS + WITH_TAGS

STRANGER = r'''
"""Reads one slice of a run from docs/format.md alone: no import of this project."""
import base64, json, pathlib, sys
import numpy as np
import zarr

run, number, site, layer, head, out = sys.argv[1:]
run, number, layer, head = pathlib.Path(run), int(number), int(layer), int(head)
assert "store" not in sys.modules

def repair_of(path):
    stem = path.name.removesuffix(".json")
    return int(stem.partition(".r")[2] or 0)

assert json.loads((run / "run.json").read_text())["format_version"] == 1
newest = {}
for path in (run / "commits").glob("[0-9]*/*.json"):
    unit = path.name[:8]
    if unit not in newest or repair_of(path) > repair_of(newest[unit]):
        newest[unit] = path
for path in newest.values():
    commit = json.loads(path.read_text())
    i = number - commit["first_prompt"]
    prompts = commit["prompts"]
    if 0 <= i < len(prompts["outcome"]):
        break
assert prompts["outcome"][i] == "stored", prompts["reasons"]
(record,) = [one for one in commit["arrays"] if one["site"] == site]
folder = run / "data" / f"{commit['unit']:08d}" / commit["attempt"]
for one in commit["objects"]:
    assert (folder / one["name"]).stat().st_size == one["bytes"]
array = zarr.open_group(folder, mode="r")[site]
assert array.attrs["heads"] == record["heads"] and array.attrs["layers"] == record["layers"]
first = prompts["first_row"][i]
rows = slice(first, first + prompts["num_rows"][i])
values = array[record["layers"].index(layer), rows, record["heads"].index(head)]
np.save(out, values)
'''

BY_BYTES = r'''
"""Fetches one raw chunk and checks its crc32c and tag, from docs/format.md alone."""
import json, pathlib, sys
import numpy as np
from crc32c import crc32c

run, unit, site, layer, head, out = sys.argv[1:]
run, unit, layer, head = pathlib.Path(run), int(unit), int(layer), int(head)
assert "store" not in sys.modules

folder = run / "commits" / f"{unit // 1000:06d}"
paths = sorted(folder.glob(f"{unit:08d}*.json"), key=lambda path: len(path.name))
commit = json.loads(paths[-1].read_text())
(record,) = [one for one in commit["arrays"] if one["site"] == site]
assert record["codec"] == "raw" and record["tags"] is True and record["dtype"] == "bfloat16"
head_shard, inside = divmod(record["heads"].index(head), record["shard_heads"])
group, place = divmod(inside, record["group_heads"])
layer_index = record["layers"].index(layer)
name = f"data/{unit:08d}/{commit['attempt']}/{site}/c/{layer_index}/0/{head_shard}/0"
shard = (run / name).read_bytes()
shape = (record["group_heads"], record["chunk_tokens"], record["head_size"])
size = 2 * shape[0] * shape[1] * shape[2]
chunks = -(-min(record["num_tokens"], record["shard_tokens"]) // record["chunk_tokens"])
found = []
for token_chunk in range(chunks):
    number = group * chunks + token_chunk
    start = number * (size + 4 + 4)
    values = shard[start : start + size]
    crc, tag = shard[start + size :][:4], shard[start + size + 4 :][:4]
    assert crc == crc32c(values).to_bytes(4, "little")
    assert tag == crc32c(name.encode() + number.to_bytes(4, "little") + crc).to_bytes(4, "little")
    found.append(np.frombuffer(values, "<u2").reshape(shape)[place])
np.save(out, np.concatenate(found)[: record["num_tokens"]])
'''


def _truth(kind: str, unit: int, site: str) -> np.ndarray:
    return np.load(GOLDEN / kind / f"{unit}-{site}.npy")


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.itemsize}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_read_to_the_bit(kind):
    objects = LocalStore(GOLDEN / kind / "run")
    committed = committed_units(objects)
    assert committed == {0: keys.commit_key(0), 1: keys.commit_key(1, 1)}
    for unit, key in committed.items():
        for site, values in committed_values(objects, key).items():
            assert np.array_equal(_bits(values), _truth(kind, unit, site)), (unit, site)
    report = verify_run(objects, deep=True)
    assert report.problems == []
    assert report.units == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_commits_say_whether_there_are_tags(kind):
    for path in (GOLDEN / kind / "run" / "commits").glob("0*/*.json"):
        arrays = json.loads(path.read_text())["arrays"]
        assert {array.get("tags") for array in arrays} == {True if kind in WITH_TAGS else None}


@pytest.mark.parametrize("kind", KINDS)
def test_the_reader_and_the_snapshot_agree(kind):
    found = find_committed(LocalStore(GOLDEN / kind / "run"), RUN_ID)
    assert found.snapshot is not None
    assert found.key(1) == keys.commit_key(1, 1)
    run = open_run(GOLDEN / kind / "run")
    z = run.read("z", prompt="p2", layer=1)
    truth = _truth(kind, 0, "z")[1, 7:277].swapaxes(0, 1)
    assert np.array_equal(_bits(np.ascontiguousarray(z.values)), truth)
    k = run.read("rot_k", prompt="p4", layer=0, head=0, pos=slice(10, 12))
    assert np.array_equal(
        _bits(np.ascontiguousarray(k.values)), _truth(kind, 1, "rot_k")[0, 11:13, 0]
    )


@pytest.mark.parametrize(
    ("kind", "number", "unit", "rows", "site", "layer", "head"),
    [
        ("float32-raw", 2, 0, slice(7, 277), "z", 1, 1),
        ("float32-raw", 4, 1, slice(1, 41), "v", 0, 0),
        ("float32-small-tags", 0, 0, slice(7), "rot_q", 0, 1),
    ],
)
def test_a_stranger_reads_a_run_from_the_specification_alone(
    tmp_path, kind, number, unit, rows, site, layer, head
):
    values = _run(tmp_path, STRANGER, GOLDEN / kind / "run", number, site, layer, head)
    assert np.array_equal(_bits(values), _truth(kind, unit, site)[layer, rows, head])


@pytest.mark.parametrize(("unit", "site", "layer", "head"), [(0, "z", 1, 1), (1, "v", 0, 0)])
def test_a_stranger_checks_every_chunk_from_the_specification_alone(
    tmp_path, unit, site, layer, head
):
    kind = "bfloat16-raw-tags"
    values = _run(tmp_path, BY_BYTES, GOLDEN / kind / "run", unit, site, layer, head)
    assert np.array_equal(values, _truth(kind, unit, site)[layer, :, head])


def _run(folder: Path, program: str, *arguments: object) -> np.ndarray:
    script = folder / "stranger.py"
    script.write_text(program)
    command = [sys.executable, str(script), *map(str, arguments), str(folder / "out.npy")]
    subprocess.run(command, check=True, cwd=folder, timeout=120)
    return np.load(folder / "out.npy")


def test_a_newer_version_is_refused_by_name():
    data = (GOLDEN / "float32-raw" / "run" / keys.commit_key(0)).read_bytes()
    body = json.loads(data)
    del body["crc32c"]
    body["format_version"] = 2

    def canonical(document: dict) -> bytes:
        return json.dumps(
            document, sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode()

    newer = canonical({**body, "crc32c": hex_crc32c(crc32c(canonical(body)))})
    with pytest.raises(FormatError, match="format version 2"):
        Commit.from_bytes(newer, "commits/000000/00000000.json")
    body["format_version"] = 1
    assert canonical({**body, "crc32c": hex_crc32c(crc32c(canonical(body)))}) == data
