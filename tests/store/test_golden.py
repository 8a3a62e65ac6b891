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

GOLDEN = Path(__file__).parent / "golden" / "v1"
KINDS = ["float32-raw", "bfloat16-raw", "bfloat16-fast", "float16-small"]

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
def test_the_reader_and_the_snapshot_agree(kind):
    found = find_committed(LocalStore(GOLDEN / kind / "run"))
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
    ("number", "unit", "rows", "site", "layer", "head"),
    [
        (2, 0, slice(7, 277), "z", 1, 1),
        (4, 1, slice(1, 41), "v", 0, 0),
        (0, 0, slice(7), "rot_q", 0, 1),
    ],
)
def test_a_stranger_reads_a_run_from_the_specification_alone(
    tmp_path, number, unit, rows, site, layer, head
):
    script = tmp_path / "stranger.py"
    script.write_text(STRANGER)
    arguments = [GOLDEN / "float32-raw" / "run", number, site, layer, head, tmp_path / "out.npy"]
    command = [sys.executable, str(script), *map(str, arguments)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)
    values = np.load(tmp_path / "out.npy")
    assert np.array_equal(_bits(values), _truth("float32-raw", unit, site)[layer, rows, head])


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
