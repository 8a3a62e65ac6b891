"""A run that kept only the last positions of each prompt: rows are few, positions are the prompt's.

Truth is plain numpy over the arrays that were written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from store.commit import commit_unit
from store.errors import FormatError, SelectionError, SiteNotFound
from store.export import ExportSelection, export
from store.objects.local import LocalStore
from store.run import Run, open_run
from store.run_format import Commit
from store.snapshot import write_snapshot
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, make_unit, write_manifests, write_unit

SHAPE = SampleShape(sites=("v", "z"), ranks=2)
LENGTHS = [[10, 2, 7], [300]]
KEPT = 3
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module", params=["listed", "snapshot"])
def sample(request, tmp_path_factory) -> tuple[Run, dict[tuple[int, int], Array]]:
    """The run, and (prompt row, position) -> z [L, H, D]."""
    folder = tmp_path_factory.mktemp("selected")
    objects = LocalStore(folder)
    write_manifests(objects, SHAPE, LENGTHS)
    truth, first = {}, 0
    for number, lengths in enumerate(LENGTHS):
        rows = [min(n, KEPT) for n in lengths]
        unit = make_unit(SHAPE, number, first, rows, seed=9)
        body = write_unit(objects, SHAPE, unit, "a0").model_dump()
        starts = [n - kept for n, kept in zip(lengths, rows, strict=True)]
        body["prompts"]["first_position"] = starts
        assert commit_unit(objects, Commit.model_validate(body)).won
        row = 0
        for place, (start, kept) in enumerate(zip(starts, rows, strict=True)):
            for i in range(kept):
                truth[first + place, start + i] = unit.arrays["z"][:, row + i]
            row += kept
        first += len(lengths)
    if request.param == "snapshot":
        write_snapshot(objects, RUN_ID)
    return open_run(str(folder)), truth


def write_kept(objects: LocalStore, positions: str, starts: list[int], rows: list[int]) -> Array:
    """Write a run of one unit that says it keeps `positions`; return its z [L, T, H, D]."""
    write_manifests(objects, SHAPE, [[10, 2, 7]], capture={"positions": positions})
    unit = make_unit(SHAPE, 0, 0, rows, seed=9)
    body = write_unit(objects, SHAPE, unit, "a0").model_dump()
    body["prompts"]["first_position"] = starts
    assert commit_unit(objects, Commit.model_validate(body)).won
    return unit.arrays["z"]


@pytest.mark.parametrize(
    ("positions", "starts", "rows"),
    [
        ("0:3", [0, 0, 0], [3, 2, 3]),
        (":3", [0, 0, 0], [3, 2, 3]),
        ("1:-1", [1, 0, 1], [8, 0, 5]),
        ("last", [9, 1, 6], [1, 1, 1]),
        ("-3:", [7, 0, 4], [3, 2, 3]),
    ],
)
def test_positions_that_the_config_keeps_are_read_and_sound(tmp_path, positions, starts, rows):
    objects = LocalStore(tmp_path)
    z_LTHD = write_kept(objects, positions, starts, rows)
    for deep in (False, True):
        assert verify_run(objects, deep=deep).problems == []
    write_snapshot(objects, RUN_ID)
    run, row = open_run(str(tmp_path)), 0
    for place, (start, kept) in enumerate(zip(starts, rows, strict=True)):
        if kept:
            got = run.read("z", prompt=place)
            assert got.pos.values.tolist() == list(range(start, start + kept))
            want_LTHD = z_LTHD[:, row : row + kept]
            np.testing.assert_array_equal(got.values, want_LTHD.swapaxes(1, 2))
        row += kept
    seen = [
        pair
        for batch in run.batches(["z"], size=100)
        for pair in zip(batch.prompt.tolist(), batch.pos.tolist(), strict=True)
    ]
    held = enumerate(zip(starts, rows, strict=True))
    assert seen == [(place, start + i) for place, (start, kept) in held for i in range(kept)]


@pytest.mark.parametrize(
    ("positions", "starts", "rows"),
    [
        ("all", [0, 0, 0], [3, 2, 3]),
        ("0:4", [0, 0, 0], [3, 2, 3]),
        ("-3:", [6, 0, 4], [3, 2, 3]),
        ("2:5", [1, 1, 1], [3, 1, 3]),
    ],
)
def test_rows_of_other_positions_than_the_config_keeps_are_refused(
    tmp_path, positions, starts, rows
):
    objects = LocalStore(tmp_path)
    write_kept(objects, positions, starts, rows)
    with pytest.raises(FormatError, match="attnstore verify"):
        open_run(str(tmp_path)).read("z", prompt="p0")
    assert not verify_run(objects, deep=True).ok


@pytest.mark.parametrize(
    ("positions", "starts", "rows"),
    [
        ("all", [0, 0, 0], [10, 2, 8]),
        ("all", [0, 0, 0], [10, 2, 6]),
        ("all", [0, 1, 0], [10, 1, 7]),
        ("0:3", [0, 0, 1], [3, 2, 3]),
        ("2:5", [2, 0, 3], [3, 0, 3]),
        ("last", [8, 1, 6], [1, 1, 1]),
        ("last", [9, 2, 6], [1, 1, 1]),
        ("-3:", [7, 0, 3], [3, 2, 4]),
        ("-3:", [8, 0, 4], [2, 2, 3]),
        ("-3:", [7, 0, 5], [3, 2, 3]),
    ],
)
def test_other_positions_are_seen_without_reading_the_prompts(tmp_path, positions, starts, rows):
    objects = LocalStore(tmp_path)
    write_kept(objects, positions, starts, rows)
    problems = verify_run(objects).problems
    assert problems
    assert {one.name for one in problems} == {"commits/000000/00000000.json"}


def test_rows_carry_the_positions_they_are_of(sample) -> None:
    run, truth = sample
    got = run.read("z", prompt="p0")
    assert got.pos.values.tolist() == [7, 8, 9]
    assert got.token.values.tolist() == ["t7", "t8", "t9"]
    for pos in (7, 8, 9):
        np.testing.assert_array_equal(got.sel(pos=pos).values, truth[0, pos])
    assert run.read("z", prompt="p1").pos.values.tolist() == [0, 1]
    last = run.read("z", prompt="p3", pos=-1)
    assert (int(last.pos), last.token.item()) == (299, "t299")
    assert run.isel("z", prompt="p3", pos=0).equals(run.read("z", prompt="p3", pos=297))
    assert run.read("z", prompt="p0", pos=slice(0, 9)).pos.values.tolist() == [7, 8]
    with pytest.raises(SelectionError, match=r"pos 3 is not there; nearest: 7 and 8; held: 7\.\.9"):
        run.read("z", prompt="p0", pos=3)


def test_streams_and_reductions_hold_those_rows(sample) -> None:
    run, truth = sample
    seen = {}
    for batch in run.batches(["z"], size=4, shuffle=2):
        for i, key in enumerate(zip(batch.prompt.tolist(), batch.pos.tolist(), strict=True)):
            seen[key] = batch.arrays["z"][i]
    assert sorted(seen) == sorted(truth)
    for key, values in seen.items():
        np.testing.assert_array_equal(values, truth[key])
    (late,) = run.batches(["z"], pos=slice(8, None), prompts=["p0", "p1", "p3"])
    pairs = list(zip(late.prompt.tolist(), late.pos.tolist(), strict=True))
    assert pairs == [(0, 8), (0, 9), (3, 297), (3, 298), (3, 299)]
    rows = np.stack(list(truth.values())).astype(np.float64)
    moments = run.moments("z")
    assert moments.attrs["rows"] == 11
    np.testing.assert_allclose(moments["std"].values, rows.std(axis=0), atol=1e-9)
    best = run.top_rows("z", 3).to_pylist()
    assert {(row["prompt_id"], row["pos"], row["token"]) for row in best} <= {
        (f"p{row}", pos, f"t{pos}") for row, pos in truth
    }


def test_other_ways_out_know_them_too(sample, tmp_path) -> None:
    run, _ = sample
    assert run.cache("p3")["z", 1].shape == (1, KEPT, 4, 16)
    with pytest.raises(SiteNotFound, match="rebuilt from rot_q and rot_k"):
        run.pattern("p0")
    with pytest.raises(SiteNotFound, match="rebuilt from rot_q and rot_k"):
        run.head_scores()
    export(run, "zarr", tmp_path / "out", ExportSelection(sites=["z"]))
    import zarr

    group = zarr.open_group(tmp_path / "out" / "data.zarr", mode="r")
    assert group["pos"][:].tolist() == [7, 8, 9, 0, 1, 4, 5, 6, 297, 298, 299]
    assert run.explain("z", prompt="p3", layer=0, head=0).wanted_bytes == KEPT * 16 * 4
