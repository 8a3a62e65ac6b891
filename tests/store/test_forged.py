"""Documents that were altered and sealed again: reads raise, and verify says what is wrong."""

from __future__ import annotations

import json

import pytest

from store import keys, open_run
from store.attempt import AttemptWriter
from store.checksum import crc32c, hex_crc32c
from store.commit import commit_unit
from store.errors import DamagedObject, FormatError, RunError
from store.generated import GENERATED, Continuation, generated_bytes
from store.objects.local import LocalStore
from store.run_format import ArrayRecord, ModelManifest
from store.sealed_json import seal, unseal
from store.verify import verify_run
from tests.store.sample_run import SampleShape, make_unit, write_manifests, write_run, write_unit

LENGTHS = [[300, 0, 7]]
COMMIT = keys.commit_key(0)


@pytest.fixture
def run(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(dtype="bfloat16", ranks=2), LENGTHS)
    return objects


def rewrite(objects: LocalStore, name: str, change) -> None:
    body = unseal(objects.get(name, max_bytes=1 << 20), name)
    change(body)
    objects.put(name, [seal(body)])


def array_change(change):
    def of_all(body) -> None:
        for array in body["arrays"]:
            change(array)

    return of_all


def set_array(**members):
    return array_change(lambda array: array.update(members))


def regroup(array) -> None:
    """The same chunks of the same sizes, read across: values would move between heads and rows."""
    array.update(chunk_tokens=array["chunk_tokens"] * 2, head_size=array["head_size"] // 2)


def other_ranks(body) -> None:
    for rank in body["ranks"]:
        rank["heads"] = {site: heads[::-1] for site, heads in rank["heads"].items()}


COMMITS = {
    "layers reversed": set_array(layers=[1, 0]),
    "a layer twice": set_array(layers=[1, 1]),
    "layers shifted": set_array(layers=[1, 2]),
    "heads reversed": array_change(lambda array: array.update(heads=array["heads"][::-1])),
    "a head twice": array_change(lambda array: array.update(heads=[0] * len(array["heads"]))),
    "heads shifted": array_change(lambda a: a.update(heads=[h + 1 for h in a["heads"]])),
    "another type of the same size": set_array(dtype="float16"),
    "chunks read across": array_change(regroup),
    "axes renamed": set_array(dims=["layer", "head", "token", "d_head"]),
    "heads that the ranks did not write": other_ranks,
    "another model": lambda body: body.update(model_crc32c="00000000"),
}


@pytest.mark.parametrize("change", COMMITS)
def test_a_commit_sealed_again_is_refused(run, change):
    assert verify_run(run, deep=True).problems == []
    rewrite(run, COMMIT, COMMITS[change])
    with pytest.raises(RunError, match="attnstore verify"):
        open_run(run.url).read("z", prompt="p0", layer=0)
    problems = verify_run(run).problems
    assert COMMIT in {problem.name for problem in problems}


KEPT = {"capture": {"sites": ["rot_q", "rot_k", "v", "z"]}}


def without_arrays(body) -> None:
    body.update(arrays=[], objects=[], ranks=[])


def without_site(body) -> None:
    body["arrays"] = [array for array in body["arrays"] if array["site"] != "z"]
    body["objects"] = [one for one in body["objects"] if not one["name"].startswith("z/")]
    for rank in body["ranks"]:
        del rank["heads"]["z"]


def many_rows(body) -> None:
    """Rows that no memory holds: of the first prompt, in no array or in one shard of all."""
    more = (1 << 44) - body["prompts"]["num_rows"][0]
    body["prompts"]["num_rows"][0] += more
    body["prompts"]["first_row"][1:] = [row + more for row in body["prompts"]["first_row"][1:]]


def rows_in_long_shards(body) -> None:
    """As many rows as one shard a layer and head may be said to hold, and more than are there."""
    rows = 1 << 28
    more = rows - sum(body["prompts"]["num_rows"])
    body["prompts"]["num_rows"][0] += more
    body["prompts"]["first_row"][1:] = [row + more for row in body["prompts"]["first_row"][1:]]
    for array in body["arrays"]:
        array.update(num_tokens=rows, shard_tokens=rows)
        record = ArrayRecord.model_validate(array)
        geometry = record.geometry()
        names = {
            record.shard_name(*place[:3]): geometry.raw_shard_bytes(place[1])
            for place in geometry.shard_places()
        }
        for one in body["objects"]:
            if one["name"] in names:
                one["bytes"] = names[one["name"]]


def unheld(change):
    def both(body) -> None:
        without_arrays(body)
        change(body)

    return both


@pytest.fixture
def kept(tmp_path):
    """A run whose config names its sites."""
    objects, shape = LocalStore(tmp_path), SampleShape(dtype="bfloat16")
    write_manifests(objects, shape, LENGTHS, **KEPT)
    commit = write_unit(objects, shape, make_unit(shape, 0, 0, LENGTHS[0], 3), "a0")
    assert commit_unit(objects, commit).won
    assert verify_run(objects, deep=True).problems == []
    return objects


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_arrays, "stored, in no array"),
        (without_site, "holds no z, which run.json says the run keeps; it holds rot_q, rot_k, v"),
        (unheld(many_rows), "stored, in no array"),
        (many_rows, "contradicts itself"),
        (rows_in_long_shards, "the plan gives it 300 tokens"),
    ],
)
def test_prompts_that_are_called_stored_and_are_not_are_refused(kept, change, message):
    rewrite(kept, COMMIT, change)
    problems = verify_run(kept, deep=True).problems
    assert COMMIT in {problem.name for problem in problems}
    run = open_run(kept.url)
    for call in (
        lambda: run.read("z", prompt=0, layer=0, head=0),
        lambda: run.read("z", prompt="p0", layer=0, head=0, pos=0),
        lambda: run.pattern(0, 0, 0),
        lambda: run.explain("z", prompt=0),
        lambda: len(run.batches(["z"])),
        lambda: len(run.batches(["z"], pos=slice(0, 2))),
        lambda: run.moments("z"),
        lambda: run.head_scores("entropy"),
    ):
        with pytest.raises(FormatError, match=message):
            call()


def test_a_unit_that_lacks_what_most_units_hold_is_found(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), [[3], [4], [0], [5]])
    assert verify_run(objects).problems == []
    rewrite(objects, keys.commit_key(1), without_site)
    (problem,) = verify_run(objects).problems
    assert (problem.name, problem.unit) == (keys.commit_key(1), 1)
    assert problem.message == "holds no z, which most units hold"


@pytest.mark.parametrize(
    ("member", "value"),
    [("sites", 3), ("sites", "z"), ("sites", [3]), ("layers", "x"), ("layers", {"0": 1})],
)
def test_a_config_whose_lists_are_none_is_refused(kept, member, value):
    rewrite(kept, keys.RUN, lambda body: body["config"]["capture"].update({member: value}))
    with pytest.raises(FormatError, match=rf"capture\.{member} is .*, no list of"):
        open_run(kept.url)
    assert keys.RUN in {problem.name for problem in verify_run(kept).problems}


def layer_change(**members):
    return lambda body: body["layers"][1].update(members)


MODELS = {
    "another scale": layer_change(scale=0.5),
    "a sliding window": layer_change(sliding_window=4),
    "fewer heads": layer_change(num_heads=2),
    "layers reversed": lambda body: body["layers"].reverse(),
    "layers renumbered": layer_change(layer=5),
    "one layer less": lambda body: body["layers"].pop(),
    "another type": lambda body: body.update(dtype="float16"),
    "another width": lambda body: body.update(hidden_size=32),
    "another run": lambda body: body.update(run_id="f" * 16),
}


@pytest.mark.parametrize("change", MODELS)
def test_a_model_sealed_again_is_refused(run, change):
    rewrite(run, keys.MODEL, MODELS[change])
    opened = open_run(run.url)
    with pytest.raises(RunError):
        opened.pattern(prompt="p0", layer=0, head=0)
    with pytest.raises(RunError):
        opened.read("z", prompt="p0", layer=0)
    assert not verify_run(run).ok


@pytest.mark.parametrize("member", ["alibi_slopes", "sinks"])
def test_too_few_values_for_the_heads_of_a_layer_are_refused(run, member):
    rewrite(run, keys.MODEL, layer_change(**{member: [1.0]}))
    rewrite(run, COMMIT, lambda body: body.update(model_crc32c=None))
    for call in (lambda r: r.pattern("p0", 0, 0), lambda r: r.read("z", prompt="p0")):
        with pytest.raises(FormatError, match=f"layer 1 has 1 {member} for 4 heads"):
            call(open_run(run.url))
    assert keys.MODEL in {problem.name for problem in verify_run(run).problems}


def test_a_model_of_other_library_versions_is_the_same_model(run):
    rewrite(run, keys.MODEL, lambda body: body.update(versions={"vllm": "99"}))
    assert open_run(run.url).read("z", prompt="p0", layer=0).sizes["pos"] == 300
    assert verify_run(run, deep=True).problems == []


def test_a_model_that_is_lost_under_its_commits_is_an_error(run):
    run.delete(keys.MODEL)
    with pytest.raises(DamagedObject, match=r"model.json is missing"):
        open_run(run.url).read("z", prompt="p0", layer=0)


def test_the_fingerprint_is_what_the_format_page_says(run):
    body = json.loads(run.get(keys.MODEL, max_bytes=1 << 20))
    for layer in body["layers"]:
        assert layer["sinks"] is None
    described = {
        "architecture": body["architecture"],
        "dtype": body["dtype"],
        "hidden_size": body["hidden_size"],
        "layers": [{k: v for k, v in one.items() if v is not None} for one in body["layers"]],
    }
    text = json.dumps(described, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    stated = json.loads(run.get(COMMIT, max_bytes=1 << 20))["model_crc32c"]
    assert stated == hex_crc32c(crc32c(text.encode()))
    model = ModelManifest.from_bytes(run.get(keys.MODEL, max_bytes=1 << 20), keys.MODEL)
    assert model.fingerprint == stated


@pytest.mark.parametrize(
    ("name", "member", "value"),
    [
        ("z/zarr.json", "layers", [1, 0]),
        ("z/zarr.json", "heads", [3, 2, 1, 0]),
        ("z/zarr.json", "site", "rot_q"),
        ("v/zarr.json", "unit", 7),
        ("zarr.json", "attempt", "a7"),
        ("zarr.json", "run_id", "f" * 16),
    ],
)
def test_attributes_that_another_library_would_believe_are_found(run, name, member, value):
    key = f"{keys.attempt_prefix(0, 'a0')}{name}"
    document = json.loads(run.get(key, max_bytes=1 << 20))
    document["attributes"][member] = value
    data = json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
    run.put(key, [data])

    def state(body) -> None:
        (record,) = [one for one in body["objects"] if one["name"] == name]
        record.update(bytes=len(data), crc32c=hex_crc32c(crc32c(data)))

    rewrite(run, COMMIT, state)
    (problem,) = verify_run(run, deep=True).problems
    assert problem.name == key
    assert member in problem.message


@pytest.fixture
def continued(tmp_path):
    """A unit of two prompts of 5 and 4 tokens that were given 3 and 2 more."""
    objects, shape = LocalStore(tmp_path), SampleShape(dtype="bfloat16")
    write_manifests(objects, shape, [[5, 4]])
    commit = write_unit(objects, shape, make_unit(shape, 0, 0, [7, 5], 3), "a0")
    said = [
        (place, Continuation((1,) * count, ("x",) * count, (-1.0,) * count, "length"))
        for place, count in ((0, 3), (1, 2))
    ]
    record = AttemptWriter(objects, 0, "a0").put_object(GENERATED, generated_bytes(said))
    commit = commit.model_copy(update={"objects": [*commit.objects, record]})
    assert commit_unit(objects, commit).won
    assert verify_run(objects, deep=True).problems == []
    assert open_run(objects.url).read("z", prompt="p1", layer=0).sizes["pos"] == 5
    return objects


@pytest.mark.parametrize(
    "members",
    [
        {"first_position": [1, 0]},
        {"num_rows": [8, 4], "first_row": [0, 8]},
        {"num_rows": [5, 7], "first_row": [0, 5]},
    ],
)
def test_rows_moved_among_continued_prompts_are_refused(continued, members):
    rewrite(continued, COMMIT, lambda body: body["prompts"].update(members))
    moved = "p1" if members.get("num_rows") == [5, 7] else "p0"
    with pytest.raises(FormatError, match="generated ones"):
        open_run(continued.url).read("z", prompt=moved, layer=0)
    assert COMMIT in {one.name for one in verify_run(continued, deep=True).problems}


def test_what_was_said_in_no_parquet_is_an_error_of_ours(continued):
    name = f"{keys.attempt_prefix(0, 'a0')}{GENERATED}"
    data = b"PAR1 and nothing else"
    continued.put(name, [data])

    def state(body) -> None:
        (record,) = [one for one in body["objects"] if one["name"] == GENERATED]
        record.update(bytes=len(data), crc32c=hex_crc32c(crc32c(data)))

    rewrite(continued, COMMIT, state)
    with pytest.raises(FormatError, match="not readable as Parquet"):
        open_run(continued.url).tokens("p0")
    assert [one.name for one in verify_run(continued, deep=True).problems] == [name]
