"""verify knows what lies beside the data: W_O, summaries, and names that belong to nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from store import open_run
from store.errors import DamagedObject
from store.objects.local import LocalStore
from store.objects.obstore_store import ObstoreStore
from store.summaries import SUMMARIES
from store.verify import verify_run
from store.weights import (
    WEIGHTS,
    OutputProjection,
    read_output_projection,
    weight_key,
    write_output_projection,
)
from tests.store.sample_run import RUN_ID, SampleShape, write_manifests, write_run

FLIPS = 300


def projection(layer: int, heads: int = 4, hidden: int = 64) -> OutputProjection:
    values = np.random.default_rng(layer).standard_normal((heads, 16, hidden))
    return OutputProjection(layer, values.astype(ml_dtypes.bfloat16))


@pytest.fixture
def run(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(dtype="bfloat16"), [[40, 7]])
    for layer in (0, 1):
        write_output_projection(objects, projection(layer), RUN_ID)
    table = pa.table({"prompt_id": ["p0", "p1"], "score": [0.5, 0.25]})
    open_run(objects.url).save_summary("scores", table)
    return objects


def names(objects, *, deep: bool = False) -> list[str]:
    return [problem.name for problem in verify_run(objects, deep=deep).problems]


def summary_table(objects) -> str:
    (name,) = [i.name for i in objects.list(SUMMARIES) if i.name.endswith(".parquet")]
    return name


def test_a_whole_run_has_no_problems_and_counts_them(run):
    plain = verify_run(run, deep=True)
    assert plain.problems == []
    for info in [*run.list(WEIGHTS), *run.list(SUMMARIES)]:
        run.delete(info.name)
    assert verify_run(run, deep=True).objects == plain.objects - 4


@pytest.mark.parametrize("what", ["weights", "summary", "manifest"])
def test_another_size_is_found_by_the_listing(run, what):
    name = {
        "weights": weight_key(1),
        "summary": summary_table(run),
        "manifest": f"{SUMMARIES}scores.json",
    }[what]
    whole = run.get(name, max_bytes=1 << 20)
    run.put(name, [whole[:-1]])
    (problem,) = names(run)
    assert problem == (f"{SUMMARIES}scores.json" if what == "summary" else name)
    run.delete(name)
    assert names(run) == ([problem] if what == "summary" else [])


def test_any_flipped_bit_is_found(run):
    memory = ObstoreStore("memory://beside-flips")
    for info in run.list(""):
        memory.put(info.name, [run.get(info.name, max_bytes=1 << 20)])
    beside = [info.name for prefix in (WEIGHTS, SUMMARIES) for info in memory.list(prefix)]
    rng = np.random.default_rng(0)
    for turn in range(FLIPS):
        name = beside[turn % len(beside)]
        whole = memory.get(name, max_bytes=1 << 20)
        # Half of them in the first 200 bytes, where the headers are.
        place = int(rng.integers(8 * (200 if turn % 2 else len(whole))))
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        memory.put(name, [damaged])
        assert not verify_run(memory, deep=True, threads=1).ok, (name, place)
        memory.put(name, [whole])
    assert verify_run(memory, deep=True).ok


@pytest.mark.parametrize(
    "name",
    [
        "weights/w_o-00002.safetensors",
        "weights/w_o-0.safetensors",
        "weights/other.bin",
        "summaries/scores/x.parquet",
        "summaries/readme.txt",
    ],
)
def test_names_that_belong_to_nothing_are_reported(run, name):
    run.put(name, [b"something"])
    assert names(run) == [name]


def test_projections_that_were_exchanged_are_found_on_read(run):
    one, other = (run.get(weight_key(layer), max_bytes=1 << 20) for layer in (0, 1))
    run.put(weight_key(0), [other])
    run.put(weight_key(1), [one])
    with pytest.raises(DamagedObject, match="is W_O of layer 1"):
        read_output_projection(run, 0, RUN_ID)
    assert names(run, deep=True) == [weight_key(0), weight_key(1)]


def test_a_projection_of_another_shape_is_found(run):
    run.delete(weight_key(0))
    write_output_projection(run, projection(0, heads=2, hidden=128), RUN_ID)
    assert names(run, deep=True) == [weight_key(0)]


def test_a_summary_of_another_run_or_name_is_found(run):
    from store.sealed_json import seal, unseal

    key = f"{SUMMARIES}scores.json"
    for change in ({"run_id": "f" * 16}, {"name": "others"}):
        whole = run.get(key, max_bytes=1 << 20)
        body = unseal(whole, key)
        assert body["run_id"] == RUN_ID
        run.put(key, [seal(body | change)])
        assert names(run) == [key]
        run.put(key, [whole])


def test_what_a_replaced_summary_leaves_is_no_problem(run):
    table = pa.table({"prompt_id": ["p0"], "score": [1.0]})
    open_run(run.url).save_summary("scores", table)
    assert names(run, deep=True) == []


@pytest.mark.parametrize(("layers", "due"), [(None, [0, 1]), ([1], [1])])
def test_a_missing_projection_is_reported_where_the_config_keeps_it(tmp_path, layers, due):
    objects = LocalStore(tmp_path)
    capture = {"output_weights": True, "layers": layers}
    write_manifests(objects, SampleShape(dtype="bfloat16"), [[3]], capture=capture)
    assert names(objects) == [weight_key(layer) for layer in due]
    for layer in due:
        write_output_projection(objects, projection(layer), RUN_ID)
    assert names(objects, deep=True) == []
