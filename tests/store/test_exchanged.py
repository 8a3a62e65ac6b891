"""Whole objects in the wrong place: the reader raises wherever what it has read can tell."""

from __future__ import annotations

import pytest

from store import keys, open_run
from store.errors import DamagedObject, FormatError, RunError
from store.objects.local import LocalStore
from store.sealed_json import seal, unseal
from store.verify import verify_run
from tests.store.sample_run import SampleShape, write_run

LENGTHS = [[30, 0, 7], [9]]
OTHER_RUN = "f" * 32


@pytest.fixture
def run(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), LENGTHS)
    return objects


def rewrite(objects, name, change):
    body = unseal(objects.get(name, max_bytes=1 << 20), name)
    change(body)
    objects.put(name, [seal(body)])


def exchange(objects, one, other):
    first, second = (objects.get(name, max_bytes=1 << 20) for name in (one, other))
    assert len(first) == len(second)
    objects.put(one, [second])
    objects.put(other, [first])


@pytest.mark.parametrize("sites", [("z", "z"), ("rot_q", "z"), ("rot_k", "v")])
def test_a_shard_read_whole_is_known_from_another_of_its_shape(run, sites):
    layers = (0, 1) if sites[0] == sites[1] else (0, 0)
    names = [f"data/00000000/a0/{s}/c/{n}/0/0/0" for s, n in zip(sites, layers, strict=True)]
    exchange(run, *names)
    with pytest.raises(DamagedObject, match="another shard's"):
        open_run(run.url).read(sites[0], prompt="p0", layer=0)
    assert len(verify_run(run, deep=True).problems) == 2


@pytest.mark.parametrize("positions", [slice(0, 3), slice(299, 302), slice(None)])
def test_a_local_shard_read_in_part_is_known_from_another(tmp_path, positions):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), [[600]])
    whole = open_run(objects.url).read("z", prompt="p0", pos=positions)
    assert whole.sizes["pos"] == len(range(600)[positions])
    shards = [info.name for info in objects.list("data/00000000/a0/z/c/0/")]
    assert shards
    for name in shards:
        exchange(objects, name, name.replace("/z/c/0/", "/z/c/1/"))
    opened = open_run(objects.url)
    for _ in range(2):
        with pytest.raises(DamagedObject, match="another shard's"):
            opened.read("z", prompt="p0", layer=0, pos=positions)


def test_a_commit_that_moves_a_row_to_the_next_prompt_is_refused(run):
    def move(body):
        prompts = body["prompts"]
        prompts["num_rows"] = [29, 0, 8]
        prompts["first_row"][2] = 29

    rewrite(run, keys.commit_key(0), move)
    opened = open_run(run.url)
    for prompt in ("p0", "p2"):
        with pytest.raises(FormatError, match="the plan gives it"):
            opened.read("z", prompt=prompt, layer=0)
    assert len(verify_run(run, deep=True).problems) == 2


@pytest.mark.parametrize("name", [keys.commit_key(0), "plan/0000/manifest.json"])
def test_parts_of_another_run_are_refused(run, name):
    rewrite(run, name, lambda body: body.update(run_id=OTHER_RUN))
    with pytest.raises(FormatError, match="belongs to run"):
        open_run(run.url).read("z", prompt="p0", layer=0)


def test_a_lost_plan_is_an_error_that_says_so(run):
    run.delete("plan/0000/manifest.json")
    with pytest.raises(RunError, match="plan"):
        open_run(run.url).prompts  # noqa: B018


def test_a_lost_model_is_found(run):
    run.delete(keys.MODEL)
    assert [problem.name for problem in verify_run(run).problems] == [keys.MODEL]
