"""The strongest keys of each query, stored or rebuilt, are those of the whole pattern."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.objects.local import LocalStore
from store.run import Run, open_run
from store.selection import AxisSelection
from store.strongest import NO_KEY, strongest
from tests.store.sample_run import SampleShape, write_run
from tests.store.test_stored_pattern import write


def axis(name: str, size: int) -> AxisSelection:
    labels = np.arange(size)
    return AxisSelection(name, labels, labels, scalar=False)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(1, 4000))
def test_it_is_the_sorted_pattern_whatever_the_tile(
    queries: int, keys: int, n: int, tile_bytes: int
) -> None:
    # Few values, so that many are equal.
    values = np.random.default_rng([queries, keys]).integers(0, 4, (2, 3, queries, keys))
    pattern = values.astype(np.float32) / 4
    picked = (axis("layer", 2), axis("head", 3), axis("query_pos", queries), axis("key_pos", keys))
    held: list[int] = []

    def read(axes: tuple[AxisSelection, ...]) -> np.ndarray:
        tile = pattern[np.ix_(*(one.indices for one in axes))]
        held.append(tile.nbytes)
        return tile

    found = strongest(read, picked, n, tile_bytes)
    assert found.values.shape == found.key_pos.shape == (2, 3, queries, n)
    for place in np.ndindex(2, 3, queries):
        want = sorted(((-p, k) for k, p in enumerate(pattern[place]) if p > 0))[:n]
        want += [(0.0, NO_KEY)] * (n - len(want))
        assert found.key_pos[place].tolist() == [k for _, k in want]
        assert (-found.values[place]).tolist() == [p for p, _ in want]
    assert max(held) <= max(tile_bytes, 2 * 3 * keys * 4)


@pytest.fixture(params=["rebuilt", "stored"])
def run(request, tmp_path: Path) -> Run:
    if request.param == "rebuilt":
        write_run(LocalStore(tmp_path), SampleShape(), [[40, 7]])
        return open_run(str(tmp_path))
    write(LocalStore(tmp_path), "float32")
    return open_run(str(tmp_path))


def test_a_run_gives_values_with_their_keys(run: Run) -> None:
    whole = run.pattern("p0", 1)
    top = run.pattern("p0", 1, topk=3)
    assert top.dims == ("head", "query_pos", "top")
    assert top.coords["key_pos"].dims == top.dims
    for head in top["head"].values:
        for query in (0, 1, 2, 17, len(whole["query_pos"]) - 1):
            row = whole.sel(head=head, query_pos=query).values
            best = np.sort(row)[::-1][: min(3, query + 1)]
            got = top.sel(head=head, query_pos=query)
            np.testing.assert_allclose(got.values[: len(best)], best, rtol=1e-6)
            keys = got.coords["key_pos"].values
            np.testing.assert_allclose(row[keys[: len(best)]], best, rtol=1e-6)
            assert (keys[query + 1 :] == NO_KEY).all()


def test_a_selection_narrows_it_and_scalars_drop(run: Run) -> None:
    one = run.pattern("p0", 0, 2, query=-1, key=slice(0, 5), topk=2)
    assert one.dims == ("top",)
    assert one.coords["key_pos"].shape == (2,)
    assert set(one.coords["key_pos"].values.tolist()) <= set(range(5))
    row = run.pattern("p0", 0, 2, query=-1, key=slice(0, 5)).values
    np.testing.assert_allclose(one.values, np.sort(row)[::-1][:2], rtol=1e-6)
    assert run.pattern("p0", 0, 2, query=-1, topk=1000).sizes["top"] == 1000


def test_none_at_all_is_refused(run: Run) -> None:
    with pytest.raises(ValueError, match="at least one"):
        run.pattern("p0", 0, topk=0)
