"""Selections by label and by place against plain Python lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import SelectionError, SiteNotFound
from store.selection import describe, select

bounds = st.none() | st.integers(-12, 12)
steps = st.none() | st.integers(-4, 4).filter(bool)


@given(size=st.integers(0, 9), start=bounds, stop=bounds, step=steps, by_place=st.booleans())
def test_a_slice_over_all_labels_is_pythons_slice(
    size: int, start: int | None, stop: int | None, step: int | None, by_place: bool
) -> None:
    choice = slice(start, stop, step)
    got = select("pos", range(size), choice, by_place=by_place)
    assert got.indices.tolist() == list(range(size))[choice]
    assert not got.scalar


@given(
    labels=st.sets(st.integers(0, 30)).map(sorted),
    start=st.none() | st.integers(0, 35),
    stop=st.none() | st.integers(0, 35),
    step=st.none() | st.integers(1, 3),
)
def test_a_slice_by_label_is_half_open_over_what_is_held(
    labels: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    got = select("layer", labels, slice(start, stop, step))
    want = [x for x in labels if (start is None or x >= start) and (stop is None or x < stop)]
    assert got.labels.tolist() == want[:: step or 1]


@given(data=st.data(), labels=st.sets(st.integers(0, 30), min_size=1).map(sorted))
def test_lists_keep_their_order_and_scalars_drop(data: Any, labels: list[int]) -> None:
    picked = data.draw(st.lists(st.sampled_from(labels)))
    got = select("head", labels, picked)
    assert got.labels.tolist() == picked
    assert not got.scalar
    assert [labels[i] for i in got.indices] == picked
    one = select("head", labels, picked[0] if picked else labels[0])
    assert one.scalar
    assert len(one) == 1


def test_negative_numbers_count_from_the_end_of_what_is_held() -> None:
    assert select("layer", [0, 5, 7], -1).labels.tolist() == [7]
    assert select("layer", [0, 5, 7], [-3, 5]).labels.tolist() == [0, 5]
    assert select("layer", [0, 5, 7], slice(-2, None)).labels.tolist() == [5, 7]


def test_masks_arrays_and_ranges() -> None:
    assert select("head", [2, 3, 4], np.array([True, False, True])).labels.tolist() == [2, 4]
    assert select("head", [2, 3, 4], range(3, 5)).labels.tolist() == [3, 4]
    assert select("head", [2, 3, 4], np.int32(3)).scalar
    assert select("head", [2, 3, 4], 1, by_place=True).labels.tolist() == [3]
    assert select("head", [2, 3, 4], []).indices.tolist() == []


def test_errors_name_the_nearest_labels() -> None:
    with pytest.raises(SiteNotFound, match="layer 6 is not there; nearest: 5 and 7; held: 0, 5"):
        select("layer", [0, 5, 7], 6)
    with pytest.raises(SelectionError, match="pos 40 is not there; nearest: 35 and 36; held: 0"):
        select("pos", range(37), [0, 40])
    with pytest.raises(IndexError, match="counts from the end, but only 3"):
        select("key_pos", range(3), -4)
    with pytest.raises(LookupError, match="head index 3 is not there"):
        select("head", [2, 3, 4], 3, by_place=True)
    with pytest.raises(SiteNotFound, match="mask of shape"):
        select("head", [2, 3, 4], np.array([True]))


@pytest.mark.parametrize("choice", ["3", True, 1.5, [[1]], slice("a", None)])
def test_what_is_no_selection_is_a_type_error(choice: Any) -> None:
    with pytest.raises(TypeError):
        select("head", range(4), choice)


def test_describe_is_short() -> None:
    assert describe(range(32)) == "0..31"
    assert describe([]) == "none"
    assert describe([1, 4]) == "1, 4"
    assert describe(range(0, 60, 2)) == "0, 2, 4, 6, 8, 10, ... 58 (30 in all)"
