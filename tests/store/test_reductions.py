"""Reductions over a run against plain numpy over the arrays that were written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from store import keys as names
from store import reductions
from store.errors import PromptNotStored, SiteNotFound
from store.objects.local import LocalStore
from store.plan import PROMPT_FIELDS
from store.plan_writer import write_segment
from store.run import Run, open_run
from tests.store.sample_run import (
    RUN_ID,
    SampleShape,
    SampleUnit,
    capture,
    plan_tables,
    sample_units,
    write_manifests,
)

LENGTHS = [[40, 0, 7], [1, 90]]
VOCABULARY = ["the", " cat", ",", " sat", ".", "\n"]
Array = np.ndarray[Any, Any]


def token_ids(length: int, prompt: int) -> list[int]:
    """Few different tokens, so that most repeat."""
    rng = np.random.default_rng(prompt)
    return [int(i) for i in rng.integers(0, len(VOCABULARY), length)]


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> tuple[Run, list[SampleUnit]]:
    folder = tmp_path_factory.mktemp("reduced")
    objects, shape = LocalStore(folder), SampleShape(num_layers=3, ranks=2)
    units = sample_units(shape, LENGTHS)
    write_manifests(objects, shape, LENGTHS)
    for info in list(objects.list(names.PLAN)):
        objects.delete(info.name)
    tables = plan_tables(LENGTHS)
    flat = [n for unit in LENGTHS for n in unit]
    ids = [token_ids(n, i) for i, n in enumerate(flat)]
    columns = {name: tables["prompts"][name] for name in PROMPT_FIELDS.names}
    columns["token_ids"] = pa.array(ids, pa.list_(pa.int32()))
    columns["token_strings"] = pa.array(
        [[VOCABULARY[i] for i in one] for one in ids], pa.list_(pa.string())
    )
    prompts = pa.table(columns, schema=PROMPT_FIELDS).append_column(
        "split", tables["prompts"]["split"]
    )
    write_segment(objects, run_id=RUN_ID, segment=0, prompts=prompts, units=tables["units"])
    for unit in units:
        capture(objects, shape, unit)
    return open_run(str(folder)), units


def weights_of(run: Run, prompt: int) -> Array:
    """One prompt's pattern [L, N, Q, K], checked elsewhere against the formula."""
    return run.pattern(prompt).values.astype(np.float64)


def naive(run: Run, per_query: Callable[[list[int], int], list[int] | None]) -> tuple[Array, int]:
    """Mean over queries of attention to the keys that `per_query(ids, q)` lists, in plain loops."""
    total, count = np.zeros((3, 4)), 0
    for prompt in (0, 2, 3, 4):
        weights = weights_of(run, prompt)
        ids = run.tokens(prompt).ids.tolist()
        for q in range(len(ids)):
            targets = per_query(ids, q)
            if targets:
                total += weights[:, :, q, targets].sum(axis=-1)
                count += 1
    return total / count, count


NAIVE: dict[str, Callable[[list[int], int], list[int] | None]] = {
    "induction": lambda ids, q: [j + 1 for j in range(q - 1) if ids[j] == ids[q]],
    "duplicate_token": lambda ids, q: [j for j in range(q) if ids[j] == ids[q]],
    "previous_token": lambda _, q: [q - 1] if q else None,
    "first_token": lambda _, q: [0] if q else None,
    "current_token": lambda _, q: [q] if q else None,
}


@pytest.mark.parametrize("kind", NAIVE)
@pytest.mark.parametrize("small", [False, True])
def test_head_scores_are_the_plain_mean(sample, kind, small, monkeypatch) -> None:
    if small:
        monkeypatch.setattr(reductions, "TILE_BYTES", 4 * 90 * 4 * 5)
        monkeypatch.setattr(reductions, "BLOCK_BYTES", 3000)
    run, _ = sample
    want, count = naive(run, NAIVE[kind])
    got = run.head_scores(kind)
    assert got.dims == ("layer", "head")
    assert got.attrs == {"queries": count, "prompts": 4}
    np.testing.assert_allclose(got.values, want, atol=1e-6)
    part = run.head_scores(kind, layers=[2], heads=[3, 0])
    np.testing.assert_allclose(part.values, want[2:, [3, 0]], atol=1e-6)


def test_entropy(sample) -> None:
    run, _ = sample
    total, count = np.zeros((3, 4)), 0
    for prompt in (0, 2, 3, 4):
        weights = weights_of(run, prompt)
        total -= (weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=(-1, -2))
        count += weights.shape[-1]
    np.testing.assert_allclose(run.head_scores("entropy").values, total / count, atol=1e-5)


def test_attention_to_a_class_of_tokens(sample) -> None:
    run, _ = sample
    want, _ = naive(run, lambda ids, q: [j for j in range(q) if ids[j] in (2, 4)])
    np.testing.assert_allclose(run.attention_to(r"[.,]").values, want, atol=1e-6)
    np.testing.assert_allclose(run.attention_to([4, 2]).values, want, atol=1e-6)
    with pytest.raises(SiteNotFound, match="no token"):
        run.attention_to("zebra")


def test_per_prompt_scores_are_a_table_that_sql_can_use(sample) -> None:
    run, _ = sample
    table = run.head_scores("previous-token", per_prompt=True)
    assert table.num_rows == 4 * 3 * 4
    one = table.filter(pa.compute.equal(table["prompt_id"], "p2")).to_pylist()
    want = run.head_scores("previous_token", prompts=["p2"]).values
    assert [row["score"] for row in one] == pytest.approx(want.ravel().tolist())
    best = run.sql(
        "select prompt_id, layer, head from scores join prompts using (prompt_id) "
        "where split = 'train' and score is not null order by score desc limit 1",
        scores=table,
    )
    assert best.num_rows == 1


def test_unknown_scores_and_nothing_to_score(sample, tmp_path) -> None:
    run, _ = sample
    with pytest.raises(ValueError, match="did you mean 'induction'"):
        run.head_scores("inducton")
    shape = SampleShape()
    write_manifests(LocalStore(tmp_path), shape, LENGTHS)
    with pytest.raises(PromptNotStored, match="nothing to score"):
        open_run(str(tmp_path)).head_scores()


def test_moments(sample) -> None:
    run, units = sample
    for site, dim in (("z", "head"), ("v", "kv_head")):
        rows = np.concatenate([unit.arrays[site] for unit in units], axis=1).astype(np.float64)
        got = run.moments(site, layers=[0, 2])
        assert got["mean"].dims == ("layer", dim, "d_head")
        assert got.attrs["rows"] == sum(map(sum, LENGTHS))
        np.testing.assert_allclose(got["mean"].values, rows.mean(axis=1)[[0, 2]], atol=1e-9)
        np.testing.assert_allclose(got["std"].values, rows.std(axis=1)[[0, 2]], atol=1e-9)


@pytest.mark.parametrize("directed", [False, True])
def test_top_rows(sample, directed: bool) -> None:
    run, units = sample
    direction = (
        np.random.default_rng(0).standard_normal(16).astype(np.float32) if directed else None
    )
    rows = np.concatenate([unit.arrays["z"] for unit in units], axis=1)
    values = rows @ direction if direction is not None else np.linalg.norm(rows, axis=-1)
    got = run.top_rows("z", 7, direction=direction)
    assert got["value"].to_pylist() == pytest.approx(sorted(values.ravel())[:-8:-1], rel=1e-5)
    best = got.to_pylist()[0]
    vector = run.read(
        "z", prompt=best["prompt_id"], layer=best["layer"], head=best["head"], pos=best["pos"]
    ).values
    value = float(vector @ direction) if direction is not None else float(np.linalg.norm(vector))
    assert value == pytest.approx(best["value"], rel=1e-5)
    assert best["token"] == run.tokens(best["prompt_id"]).strings[best["pos"]]
