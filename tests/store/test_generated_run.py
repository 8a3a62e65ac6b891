"""A run whose prompts were continued: rows = tokens + generated - 1, and every call knows it.

Truth is plain numpy over the arrays that were written, and the tokens as they were said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from store.attempt import AttemptWriter
from store.catalog import diff
from store.commit import commit_unit
from store.errors import FormatError, PromptNotStored, RunError, SelectionError
from store.export import ExportSelection, export
from store.generated import GENERATED, Continuation, generated_bytes
from store.objects.local import LocalStore
from store.prompt_blocks import choose
from store.run import Run, open_run
from store.snapshot import write_snapshot
from tests.store.sample_run import (
    RUN_ID,
    SampleShape,
    SampleUnit,
    make_unit,
    write_manifests,
    write_unit,
)

SHAPE = SampleShape(num_layers=2, ranks=2)
LENGTHS = [[5, 0, 4], [300], [6]]
"""Tokens of each prompt as planned; p1 failed, and the last unit is pending."""
SAID: dict[int, list[int]] = {0: [2, 3, 9], 2: [1], 3: [7, 0, 2, 7]}
"""Prompt row -> generated ids. Planned ids are 0, 1, 2, ..."""
Array = np.ndarray[Any, Any]


def continuation(ids: list[int]) -> Continuation:
    logprobs = tuple(-0.5 * (i + 1) for i in range(len(ids)))
    return Continuation(tuple(ids), tuple(f"g{i}" for i in ids), logprobs, "length")


def write(
    folder: Path, said: dict[int, list[int]] = SAID, *, told: bool = True
) -> list[SampleUnit]:
    """Write the run; without `told` the commits do not name what was said."""
    objects = LocalStore(folder)
    write_manifests(objects, SHAPE, LENGTHS)
    units, first = [], 0
    for number, lengths in enumerate(LENGTHS[:2]):
        rows = [n + len(said[first + i]) - 1 if n else 0 for i, n in enumerate(lengths)]
        unit = make_unit(SHAPE, number, first, rows, seed=4)
        commit = write_unit(objects, SHAPE, unit, "a0")
        words = [(i, continuation(said[first + i])) for i, n in enumerate(lengths) if n]
        if told:
            record = AttemptWriter(objects, number, "a0").put_object(
                GENERATED, generated_bytes(words)
            )
            commit = commit.model_copy(update={"objects": [*commit.objects, record]})
        assert commit_unit(objects, commit).won
        units.append(unit)
        first += len(lengths)
    return units


@pytest.fixture(scope="module", params=["listed", "snapshot"])
def sample(request, tmp_path_factory) -> tuple[Run, dict[int, dict[str, Array]]]:
    """The opened run, and prompt row -> site -> [L, H, T, D]."""
    folder = tmp_path_factory.mktemp("generated")
    units = write(folder)
    if request.param == "snapshot":
        write_snapshot(LocalStore(folder), RUN_ID)
    truth: dict[int, dict[str, Array]] = {}
    for unit in units:
        start = 0
        for place, rows in enumerate(unit.lengths):
            truth[unit.first_prompt + place] = {
                site: values[:, start : start + rows].swapaxes(1, 2)
                for site, values in unit.arrays.items()
            }
            start += rows
    return open_run(str(folder)), truth


def whole_ids(row: int) -> list[int]:
    planned = [n for unit in LENGTHS for n in unit][row]
    return [*range(planned), *SAID[row]]


def test_tokens_are_the_prompt_and_what_was_said(sample) -> None:
    run, _ = sample
    tokens = run.tokens("p0")
    assert tokens.ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 9]
    assert tokens.strings[4:] == ("t4", "g2", "g3", "g9")
    assert (tokens.num_generated, tokens.logprobs) == (3, (-0.5, -1.0, -1.5))
    assert len(run.tokens(2)) == 5
    for quiet in ("p1", "p4"):
        assert run.tokens(quiet).num_generated == 0
    assert run.prompts["num_tokens"].to_pylist() == [5, 0, 4, 300, 6]
    assert run.prompts["status"].to_pylist() == ["stored", "failed", "stored", "stored", "pending"]


def test_rows_reach_to_the_last_token_but_one(sample) -> None:
    run, truth = sample
    for row in SAID:
        whole = run.read("z", prompt=row)
        assert whole.sizes["pos"] == len(whole_ids(row)) - 1
        np.testing.assert_array_equal(whole.values, truth[row]["z"])
    said = run.read("v", prompt="p0", pos=slice(5, None))
    assert said.token.values.tolist() == ["g2", "g3"]
    assert said.pos.values.tolist() == [5, 6]
    np.testing.assert_array_equal(said.values, truth[0]["v"][:, :, 5:])
    last = run.read("z", prompt="p3", layer=1, head=2, pos=-1)
    assert (int(last.pos), last.token.item()) == (302, "g2")
    np.testing.assert_array_equal(last.values, truth[3]["z"][1, 2, -1])
    with pytest.raises(SelectionError, match="pos 7 is not there; nearest: 5 and 6"):
        run.read("z", prompt="p0", pos=7)


def plain_pattern(truth: dict[str, Array]) -> Array:
    """[L, N, T, T] in float64 from the arrays alone."""
    q, k = (truth[site].astype(np.float64) for site in ("rot_q", "rot_k"))
    k = np.repeat(k, SHAPE.num_heads // SHAPE.num_kv_heads, axis=1)
    scores = q @ k.swapaxes(2, 3) * SHAPE.head_size**-0.5
    rows = scores.shape[2]
    scores[:, :, ~np.tri(rows, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_patterns_reach_over_what_was_said(sample) -> None:
    run, truth = sample
    for row in SAID:
        got = run.pattern(row)
        assert got.sizes["query_pos"] == got.sizes["key_pos"] == len(whole_ids(row)) - 1
        np.testing.assert_allclose(got.values, plain_pattern(truth[row]), atol=2e-6)
    late = run.pattern("p0", 1, 3, query=-1, key=slice(3, None))
    assert late.key_token.values.tolist() == ["t3", "t4", "g2", "g3"]
    np.testing.assert_allclose(late.values, plain_pattern(truth[0])[1, 3, -1, 3:], atol=2e-6)


def test_scores_of_heads_count_queries_that_were_generated(sample) -> None:
    run, truth = sample
    for kind in ("induction", "previous_token", "duplicate_token", "entropy"):
        total, count = np.zeros((2, 4)), 0
        for row in SAID:
            ids, weights = whole_ids(row)[:-1], plain_pattern(truth[row])
            for q in range(len(ids)):
                targets = {
                    "induction": [j + 1 for j in range(q - 1) if ids[j] == ids[q]],
                    "previous_token": [q - 1] if q else [],
                    "duplicate_token": [j for j in range(q) if ids[j] == ids[q]],
                    "entropy": list(range(q + 1)),
                }[kind]
                picked = weights[:, :, q, targets]
                if targets:
                    value = -(picked * np.log(picked)) if kind == "entropy" else picked
                    total += value.sum(axis=-1)
                    count += 1
        got = run.head_scores(kind)
        assert got.attrs == {"queries": count, "prompts": 3}
        np.testing.assert_allclose(got.values, total / count, atol=1e-5)
    # Token 2 is "t2" where it was planned and "g2" where it was said.
    assert run.attention_to("g2").identical(run.attention_to([2]))


@pytest.mark.parametrize("by", ["token", "prompt"])
def test_batches_hold_every_row_that_was_computed(sample, by) -> None:
    run, truth = sample
    seen = {}
    for batch in run.batches(["z", "v"], size=2 if by == "prompt" else 50, by=by, shuffle=3):
        for i, (row, pos) in enumerate(zip(batch.prompt, batch.pos, strict=True)):
            seen[int(row), int(pos)] = True
            for site in ("z", "v"):
                want = truth[int(row)][site][:, :, pos]
                assert batch.arrays[site][i].tobytes() == np.ascontiguousarray(want).tobytes()
    assert sorted(seen) == [(row, pos) for row in SAID for pos in range(len(whole_ids(row)) - 1)]
    said = run.batches(["z"], prompts=["p0", "p2"], pos=slice(5, None))
    assert [(int(p), int(s)) for b in said for p, s in zip(b.prompt, b.pos, strict=True)] == [
        (0, 5),
        (0, 6),
    ]
    assert run.batches(["z"]).missing == {"failed": 1, "pending": 1}
    assert sum(block.num_rows for block in choose(run._index, None).blocks) == 7 + 4 + 303


def test_moments_and_top_rows(sample) -> None:
    run, truth = sample
    rows = np.concatenate([truth[row]["z"] for row in SAID], axis=2).astype(np.float64)
    np.testing.assert_allclose(run.moments("z")["mean"].values, rows.mean(axis=2), atol=1e-9)
    direction = truth[3]["z"][0, 0, 302]
    (best,) = run.top_rows("z", 1, direction=direction, layers=0, heads=0).to_pylist()
    assert (best["prompt_id"], best["pos"], best["token"]) == ("p3", 302, "g2")


def test_a_cache_and_the_cost_of_a_read_know_the_length(sample) -> None:
    run, truth = sample
    cache = run.cache("p0")
    assert cache["z", 0].shape == (1, 7, 4, 16)
    np.testing.assert_array_equal(cache["z", 0][0], truth[0]["z"][0].swapaxes(0, 1))
    assert cache["pattern", 1].shape == (1, 4, 7, 7)
    cost = run.explain("z", prompt="p3", layer=0)
    assert cost.requests >= 1
    assert cost.wanted_bytes == 4 * 303 * 16 * 4


def test_exports_hold_the_rows_and_all_the_tokens(sample, tmp_path) -> None:
    run, truth = sample
    part = ExportSelection(sites=["z"], prompts=["p0", "p3"])
    export(run, "numpy", tmp_path / "numpy", part)
    held = np.load(tmp_path / "numpy" / "prompt-00000001.npz")
    np.testing.assert_array_equal(held["z"], truth[3]["z"])
    assert held["token_ids"].tolist() == whole_ids(3)
    export(run, "hf-dataset", tmp_path / "hf", part)
    table = pq.read_table(tmp_path / "hf" / "dataset" / "train.parquet")
    assert table["tokens"][0].as_py()[-3:] == ["g2", "g3", "g9"]
    np.testing.assert_array_equal(np.asarray(table["z"][0].as_py(), np.float32), truth[0]["z"])
    export(run, "zarr", tmp_path / "zarr", part)
    import zarr

    group = zarr.open_group(tmp_path / "zarr" / "data.zarr", mode="r")
    assert group["pos"][:].tolist() == [*range(7), *range(303)]


def test_sql_counts_what_was_said(sample) -> None:
    run, _ = sample
    query = "select prompt_id, count(*) n, max(pos) last from tokens group by 1 order by 1"
    assert run.sql(query).to_pydict() == {
        "prompt_id": ["p0", "p2", "p3", "p4"],
        "n": [8, 5, 304, 6],
        "last": [7, 4, 303, 5],
    }
    assert run.sql('select sum("rows")::bigint n from units').to_pydict() == {"n": [314]}


def test_runs_that_said_other_things_do_not_compare(sample, tmp_path) -> None:
    run, _ = sample
    write(tmp_path / "other", {**SAID, 0: [2, 4, 9]})
    other = open_run(str(tmp_path / "other"))
    with pytest.raises(RunError, match="'p0' has other tokens"):
        diff(run, other)
    same = diff(run, other, ["z"], prompts=["p2", "p3"]).to_pylist()
    assert [row["rows"] for row in same] == [307, 307]


def test_a_pending_prompt_says_so(sample) -> None:
    run, _ = sample
    with pytest.raises(PromptNotStored, match="'p4' is pending"):
        run.read("z", prompt="p4")


def test_rows_beyond_a_prompt_need_what_was_said(tmp_path) -> None:
    write(tmp_path, told=False)
    run = open_run(str(tmp_path))
    for read in (
        lambda: run.read("z", prompt="p0"),
        lambda: run.pattern("p0"),
        lambda: run.head_scores(prompts=["p0"]),
        lambda: list(run.batches(["z"], prompts=["p0"])),
    ):
        with pytest.raises(FormatError, match="the plan gives it 5 tokens"):
            read()
    assert run.read("z", prompt="p2").sizes["pos"] == 4
