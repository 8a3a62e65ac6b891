"""Streams hold every prompt of a block against the plan, as the read of one prompt does."""

from __future__ import annotations

import pytest

from store import keys, open_run
from store.errors import FormatError, NothingToReduce, RunError
from store.objects.local import LocalStore
from store.sealed_json import MAX_JSON_BYTES, seal, unseal
from store.snapshot import write_snapshot
from tests.store.sample_run import RUN_ID, SampleShape, write_run

STREAMS = {
    "batches": lambda run: list(run.batches(["z"])),
    "batches of positions": lambda run: list(run.batches(["z"], pos=slice(0, 2))),
    "moments": lambda run: run.moments("z"),
    "moments of two prompts": lambda run: run.moments("z", prompts=["p0", "p1"]),
    "head_scores": lambda run: run.head_scores("entropy"),
    "attention_to": lambda run: run.attention_to("t1"),
    "top_rows": lambda run: run.top_rows("z", k=2),
}


@pytest.fixture
def objects(tmp_path):
    store = LocalStore(tmp_path)
    write_run(store, SampleShape(), [[5, 7, 5]])
    return store


def alter(objects: LocalStore, **columns: list) -> None:
    name = keys.commit_key(0)
    body = unseal(objects.get(name, max_bytes=MAX_JSON_BYTES), name)
    body["prompts"].update(columns)
    objects.put(name, [seal(body)])


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("what", STREAMS)
def test_a_commit_that_moves_rows_between_prompts_is_refused(objects, what, snapshot):
    STREAMS[what](open_run(objects.url))
    if snapshot:
        write_snapshot(objects, RUN_ID)
    alter(objects, num_rows=[5, 9, 3], first_row=[0, 5, 14])
    with pytest.raises(RunError):
        STREAMS[what](open_run(objects.url))


def test_prompts_that_are_sound_are_still_streamed(objects):
    alter(objects, num_rows=[5, 9, 3], first_row=[0, 5, 14])
    run = open_run(objects.url)
    assert run.moments("z", prompts=["p0"]).attrs["rows"] == 5
    for read in (lambda: run.read("z", prompt="p1"), lambda: run.moments("z", prompts=["p1"])):
        with pytest.raises(FormatError, match="the plan gives it 7 tokens"):
            read()


@pytest.mark.parametrize("what", STREAMS)
def test_a_plan_that_is_gone_is_said(objects, what):
    write_snapshot(objects, RUN_ID)
    for info in list(objects.list(keys.PLAN)):
        objects.delete(info.name)
    with pytest.raises(RunError):
        STREAMS[what](open_run(objects.url))


def test_moments_of_nothing_say_so(objects):
    objects.delete(keys.commit_key(0))
    with pytest.raises(NothingToReduce, match="nothing to reduce"):
        open_run(objects.url).moments("z")
