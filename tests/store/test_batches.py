"""Streams of batches: every row once, right, reproducible, resumable, split over workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store import prompt_blocks
from store.batches import Batch
from store.commit import begin_repair
from store.errors import DamagedObject, FormatError, PromptNotStored, SiteNotFound
from store.objects.local import LocalStore
from store.run import Run, open_run
from store.snapshot import write_snapshot
from tests.store.sample_run import RUN_ID, SampleShape, capture, sample_units, write_manifests

LENGTHS = [[300, 0, 7, 2], [1, 520], [5]]
STORED = [0, 2, 3, 4, 5]
ROWS = 300 + 7 + 2 + 1 + 520


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> tuple[Run, dict[tuple[int, int], np.ndarray[Any, Any]]]:
    """A run with its last unit pending, and (prompt row, pos) -> z [L, H, D]."""
    folder = tmp_path_factory.mktemp("batches")
    objects, shape = LocalStore(folder), SampleShape(ranks=2, dtype="bfloat16")
    units = sample_units(shape, LENGTHS)
    write_manifests(objects, shape, LENGTHS)
    truth = {}
    for unit in units[:2]:
        capture(objects, shape, unit)
        row = 0
        for place, length in enumerate(unit.lengths):
            for pos in range(length):
                truth[unit.first_prompt + place, pos] = unit.arrays["z"][:, row + pos]
            row += length
    return open_run(str(folder)), truth


def keys(batches: list[Batch]) -> list[tuple[int, int]]:
    return [(int(p), int(s)) for b in batches for p, s in zip(b.prompt, b.pos, strict=True)]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    size=st.integers(1, 900),
    shuffle=st.none() | st.integers(0, 5),
    buffer_bytes=st.sampled_from([1, 20_000, 256 << 20]),
    block_rows=st.sampled_from([1, 64, 1024]),
    workers=st.integers(1, 3),
)
def test_every_row_comes_once_with_its_own_values(
    sample, size, shuffle, buffer_bytes, block_rows, workers
) -> None:
    run, truth = sample
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("store.across_prompts.BLOCK_ROWS", block_rows)
        seen: list[tuple[int, int]] = []
        for worker in range(workers):
            batches = run.batches(
                ["z"], layers=[1], size=size, shuffle=shuffle, buffer_bytes=buffer_bytes,
                worker=(worker, workers),
            )  # fmt: skip
            got = list(batches)
            assert len(got) == len(batches)
            assert all(len(batch) == size for batch in got[:-1])
            for batch in got:
                for i, key in enumerate(keys([batch])):
                    assert batch.arrays["z"][i, 0].tobytes() == truth[key][1].tobytes()
            seen += keys(got)
    assert sorted(seen) == sorted(truth)


def test_plan_order_without_a_seed_and_mixing_with_one(sample) -> None:
    run, truth = sample
    assert keys(list(run.batches(["z"], size=100))) == sorted(truth)
    mixed = keys(list(run.batches(["z"], size=100, shuffle=1)))
    assert mixed == keys(list(run.batches(["z"], size=100, shuffle=1)))
    assert mixed != keys(list(run.batches(["z"], size=100, shuffle=2)))
    first = [prompt for prompt, _ in mixed[:100]]
    assert len(set(first)) > 1
    assert abs(first.count(5) / 100 - 520 / ROWS) < 0.2


@pytest.mark.parametrize("by", ["token", "prompt"])
@pytest.mark.parametrize("buffer_bytes", [20_000, 256 << 20])
@pytest.mark.parametrize("worker", [(0, 1), (0, 2), (1, 2)])
def test_resumes_at_any_batch(sample, by, buffer_bytes, worker) -> None:
    run, _ = sample
    pick: dict[str, Any] = {"size": 90 if by == "token" else 2, "by": by, "shuffle": 7}
    pick |= {"buffer_bytes": buffer_bytes, "worker": worker}
    whole = list(run.batches(["z", "v"], **pick))
    for at, batch in enumerate(whole):
        rest = list(run.batches(["z", "v"], position=batch.position, **pick))
        assert keys(rest) == keys(whole[at + 1 :])
        assert len(rest) == len(whole) - at - 1
        for mine, theirs in zip(rest, whole[at + 1 :], strict=True):
            assert mine.arrays["v"].tobytes() == theirs.arrays["v"].tobytes()


def test_by_prompt_keeps_prompts_whole_and_in_order(sample) -> None:
    run, _ = sample
    got = list(run.batches(["z"], by="prompt", size=2, shuffle=3))
    assert [len(set(b.prompt.tolist())) for b in got] == [2, 2, 1]
    for batch in got:
        for prompt in set(batch.prompt.tolist()):
            pos = batch.pos[batch.prompt == prompt]
            assert pos.tolist() == list(range(len(pos)))
    assert sorted({p for b in got for p in b.prompt.tolist()}) == STORED


def test_positions_prompts_dtype_and_labels(sample) -> None:
    run, truth = sample
    batches = run.batches(
        ["z", ("v", 0)], layers=[0], heads=[1], prompts=["p5", "p2", "p5"], pos=slice(3, None),
        size=10_000, dtype="float32",
    )  # fmt: skip
    (batch,) = list(batches)
    assert keys([batch]) == [(2, p) for p in range(3, 7)] + [(5, p) for p in range(3, 520)]
    labelled = batch.as_xarray("v")
    assert labelled.dims == ("row", "layer", "kv_head", "d_head")
    assert batch.arrays["z"].dtype == np.float32
    np.testing.assert_array_equal(batch.arrays["z"][0, 0, 0], truth[2, 3][0, 1].astype(np.float32))
    assert len(run.batches(["z"], size=400, drop_last=True)) == 2
    assert len(list(run.batches(["z"], size=400, drop_last=True))) == 2


def test_says_what_is_missing_and_refuses_what_is_not_stored(sample) -> None:
    run, _ = sample
    assert run.batches(["z"]).missing == {"failed": 1, "pending": 1}
    with pytest.raises(PromptNotStored, match="pending"):
        run.batches(["z"], prompts=["p0", "p6"])
    with pytest.raises(PromptNotStored, match="empty prompt"):
        run.batches(["z"], prompts=["p1"])
    with pytest.raises(SiteNotFound, match="stream rot_q and rot_k"):
        run.batches(["pattern"])
    with pytest.raises(ValueError, match="worker 2 of 2"):
        run.batches(["z"], worker=(2, 2))
    with pytest.raises(ValueError, match="outside the stream"):
        run.batches(["z"], position=ROWS + 1)


def test_the_buffer_bounds_what_is_held(sample, monkeypatch) -> None:
    run, _ = sample
    read: list[int] = []
    original = prompt_blocks.BlockReader.read

    def watched(self, block, **more):
        values = original(self, block, **more)
        read.append(values.nbytes)
        return values

    monkeypatch.setattr(prompt_blocks.BlockReader, "read", watched)
    row_bytes = 2 * 4 * 16 * 2
    stream = iter(run.batches(["z"], size=1, shuffle=1, buffer_bytes=400 * row_bytes))
    next(stream)
    # One group handed out, at most one more being read: never the whole run at first.
    assert sum(read) <= (300 + 520 + 50) * row_bytes
    stream.close()


def test_damage_surfaces_in_the_stream(tmp_path) -> None:
    objects, shape = LocalStore(tmp_path), SampleShape()
    (unit,) = sample_units(shape, [[300]])
    write_manifests(objects, shape, [[300]])
    capture(objects, shape, unit)
    next((tmp_path / "data").rglob("z/c/1/*/0/0")).unlink()
    with pytest.raises(OSError, match="z/c/1"):
        list(open_run(str(tmp_path)).batches(["z"]))


@pytest.mark.parametrize("again", [[300, 7, 0, 2], [300, 0, 9, 2], [300, 0, 6, 3]])
def test_a_stream_never_reads_a_repair_by_the_rows_of_what_it_replaced(tmp_path, again) -> None:
    objects, shape = LocalStore(tmp_path), SampleShape()
    write_manifests(objects, shape, LENGTHS)
    (unit,) = sample_units(shape, LENGTHS)[:1]
    capture(objects, shape, unit)
    run = open_run(str(tmp_path))
    stream = run.batches(["z"], prompts=["p0", "p2", "p3"], size=1000)
    repaired = sample_units(shape, [again], seed=8)[0]
    assert capture(objects, shape, repaired, "a1", repair=begin_repair(objects, 0)).won
    run.refresh()
    (batch,) = stream
    assert np.array_equal(batch.arrays["z"], unit.arrays["z"].swapaxes(0, 1))
    with pytest.raises(FormatError, match="the plan gives it"):
        list(run.batches(["z"], size=1000))


def test_a_snapshot_that_tells_other_rows_than_the_commit_is_noticed(tmp_path) -> None:
    """As many rows as the prompts have tokens, shared out otherwise."""
    objects, shape = LocalStore(tmp_path), SampleShape()
    write_manifests(objects, shape, [[5, 10, 20]], capture={"sites": [*shape.sites]})
    capture(objects, shape, sample_units(shape, [[5, 20, 10]])[0])
    write_snapshot(objects, RUN_ID)
    with pytest.raises(DamagedObject, match="unit 0 changed"):
        list(open_run(str(tmp_path)).batches(["z"]))
