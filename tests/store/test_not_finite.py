"""NaN and infinity stay where they are: they hide no other value, and none is taken for another."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store import reductions
from store.catalog import diff
from store.errors import SelectionError
from store.objects.local import LocalStore
from store.run import Run, open_run
from store.selection import AxisSelection
from store.strongest import NO_KEY, strongest
from tests.store.sample_run import (
    SampleShape,
    SampleUnit,
    capture,
    sample_units,
    write_manifests,
    write_run,
)

LENGTHS = [[3]] * 12


def written(
    folder: Path, change: Callable[[list[SampleUnit]], None]
) -> tuple[Run, list[SampleUnit]]:
    """Write a run of 12 units of one prompt, its values changed before."""
    objects, shape = LocalStore(folder), SampleShape()
    units = sample_units(shape, LENGTHS)
    change(units)
    write_manifests(objects, shape, LENGTHS)
    for unit in units:
        capture(objects, shape, unit)
    return open_run(objects.url), units


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("unit", [0, 5, 11])
def test_nan_hides_no_top_row(tmp_path, unit: int, directed: bool) -> None:
    def change(units: list[SampleUnit]) -> None:
        units[unit].arrays["z"][0, :, :, 0] = np.nan

    run, units = written(tmp_path, change)
    direction = np.arange(16, dtype=np.float32) if directed else None
    rows = np.concatenate([u.arrays["z"].reshape(-1, 16) for u in units]).astype(np.float64)
    values = np.linalg.norm(rows, axis=1) if direction is None else rows @ direction
    due = np.sort(values[np.isfinite(values)])[::-1]
    for k in (1, 10, 30, 5000):
        with pytest.warns(RuntimeWarning, match="12 rows of z have no value"):
            found = run.top_rows("z", k, direction=direction)
        np.testing.assert_allclose(found["value"].to_numpy(), due[:k], rtol=1e-6)
        assert found.schema.metadata == {b"left_out": b"12"}


def test_large_rows_keep_their_order(tmp_path) -> None:
    def change(units: list[SampleUnit]) -> None:
        units[3].arrays["z"][0, 1, 2] = 1e38
        units[7].arrays["z"][1, 0, 1] = 2e38
        units[9].arrays["z"][1, 0, 3, 0] = -np.inf

    run, _ = written(tmp_path, change)
    found = run.top_rows("z", 3).to_pylist()
    assert [row["prompt_id"] for row in found] == ["p9", "p7", "p3"]
    assert [row["value"] for row in found] == pytest.approx([math.inf, 8e38, 4e38], rel=1e-6)
    assert run.top_rows("z", 1, direction=np.ones(16))["prompt_id"].to_pylist() == ["p7"]


def test_ties_go_to_the_earlier_row(tmp_path) -> None:
    def change(units: list[SampleUnit]) -> None:
        for unit in units:
            unit.arrays["z"][:] = 1

    run, _ = written(tmp_path, change)
    found = run.top_rows("z", 10).to_pylist()
    want = [("p0", pos, layer, head) for pos in range(3) for layer in range(2) for head in range(4)]
    assert [(r["prompt_id"], r["pos"], r["layer"], r["head"]) for r in found] == want[:10]


@pytest.mark.parametrize(
    "direction",
    [np.ones((16, 2)), np.ones((1, 16)), np.ones(15), np.float32(1), np.full(16, np.nan)],
)
def test_a_direction_is_one_finite_number_a_component(tmp_path, direction: Any) -> None:
    run, _ = written(tmp_path, lambda _: None)
    with pytest.raises(SelectionError, match="the direction has"):
        run.top_rows("z", 3, direction=direction)
    for k in (0, -1, 1.5, True):
        with pytest.raises(SelectionError, match="at least one row"):
            run.top_rows("z", k)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("unit", [0, 5, 11])
def test_moments_of_other_components_stay(tmp_path, monkeypatch, unit: int, bad: float) -> None:
    def change(units: list[SampleUnit]) -> None:
        units[unit].arrays["z"][1, 2, 3, 4] = bad

    run, units = written(tmp_path, change)
    monkeypatch.setattr(reductions, "BLOCK_BYTES", 1)
    rows = np.concatenate([u.arrays["z"] for u in units], axis=1).astype(np.float64)
    got = run.moments("z")
    assert got.attrs["not_finite"] == 1
    is_bad = np.zeros((2, 4, 16), bool)
    is_bad[1, 3, 4] = True
    with np.errstate(invalid="ignore"):
        due = {"mean": rows.mean(axis=1), "std": rows.std(axis=1)}
    for name, want in due.items():
        values = got[name].values
        assert np.array_equal(np.isnan(values), is_bad)
        np.testing.assert_allclose(values[~is_bad], want[~is_bad], atol=1e-9)


def test_a_head_score_of_nan_is_no_missing_one(tmp_path) -> None:
    def change(units: list[SampleUnit]) -> None:
        units[4].arrays["rot_q"][1, 2, 3] = np.nan

    run, _ = written(tmp_path, change)
    scores = run.head_scores("previous_token").values  # type: ignore[union-attr]
    assert np.argwhere(np.isnan(scores)).tolist() == [[1, 3]]
    table = run.head_scores("previous_token", per_prompt=True)
    answer = run.sql("select prompt_id, layer, head from s where isnan(score)", s=table)
    assert answer.to_pylist() == [{"prompt_id": "p4", "layer": 1, "head": 3}]
    assert run.sql("select count(*) as n from s where score is null", s=table)["n"][0].as_py() == 0
    nothing = run.head_scores("induction", per_prompt=True)["score"]
    assert nothing.null_count == len(nothing)


def test_a_key_of_nan_leaves_earlier_queries(tmp_path) -> None:
    def change(units: list[SampleUnit]) -> None:
        units[0].arrays["rot_k"][0, 1, 0] = np.nan

    run, _ = written(tmp_path, change)
    pattern = run.pattern(0, 0, 0).values
    assert np.isfinite(pattern[0]).all()
    assert np.isnan(pattern[1:]).any(axis=1).all()
    assert run.pattern(0, 0, 0, topk=2).attrs["nans"] == np.isnan(pattern).sum()


def test_nan_hides_no_strong_key() -> None:
    axes = [
        AxisSelection(n, np.arange(s), np.arange(s), False)
        for n, s in zip("lhqk", (1, 1, 2, 5), strict=True)
    ]
    pattern = np.array([[0.1, np.nan, 0.5, -np.nan, 0.2], [0.4, 0.3, 0.2, 0.1, 0.0]], np.float32)

    def read(picked: tuple[AxisSelection, ...]) -> Any:
        return pattern[None, None][np.ix_(*(axis.indices for axis in picked))]

    found = strongest(read, axes, 4, tile_bytes=1)
    assert found.nans == 2
    assert found.key_pos[0, 0].tolist() == [[2, 4, 0, NO_KEY], [0, 1, 2, 3]]
    np.testing.assert_array_equal(found.values[0, 0, 0], np.float32([0.5, 0.2, 0.1, np.nan]))


def test_more_strongest_keys_than_memory_are_refused(tmp_path) -> None:
    run, _ = written(tmp_path, lambda _: None)
    with pytest.raises(SelectionError, match="ask for at most 3"):
        run.pattern(0, topk=10**9)
    for n in (1.5, True, -1):
        with pytest.raises(ValueError, match="at least one"):
            run.pattern(0, topk=n)  # type: ignore[arg-type]
    assert run.pattern(0, topk=np.uint64(2)).sizes["top"] == 2  # type: ignore[arg-type]


def test_masked_scores_are_no_difference(tmp_path) -> None:
    write_run(LocalStore(tmp_path / "a"), SampleShape(), [[4, 2]])
    write_run(LocalStore(tmp_path / "b"), SampleShape(), [[4, 2]], seed=8)
    first, second = open_run(str(tmp_path / "a")), open_run(str(tmp_path / "b"))
    assert {(r["max"], r["mean"]) for r in diff(first, first, ["scores"]).to_pylist()} == {(0, 0)}
    row = diff(first, second, ["scores"], prompts=["p0"]).to_pylist()[0]
    a, b = (run.scores("p0", 0).values for run in (first, second))
    seen = np.isfinite(a)
    assert row["max"] == pytest.approx(np.abs(a[seen] - b[seen]).max())
    assert row["mean"] == pytest.approx(np.abs(a[seen] - b[seen]).mean())
    assert row["scale"] == pytest.approx(np.abs(a[seen]).max())


def test_a_difference_of_nan_shows(tmp_path) -> None:
    def change(units: list[SampleUnit]) -> None:
        units[0].arrays["z"][0, 0, 0, 0] = np.nan
        units[1].arrays["z"][1, 0, 0, 0] = np.inf

    run, _ = written(tmp_path, change)
    nan, infinite = diff(run, run, ["z"]).to_pylist()
    assert math.isnan(nan["max"])
    assert math.isnan(nan["scale"])
    assert (infinite["max"], infinite["mean"], infinite["scale"]) == (0, 0, math.inf)
