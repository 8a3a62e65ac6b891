"""Rows of a step land where (prompt, position) says, whatever the order of arrival."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import RowsMissing
from capture.rows import ALL_POSITIONS, NOT_RUN, Positions, Span, UnitLayout, plan_step


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Span], dict[int, UnitLayout]]:
    """Spans of prompts of several units, in any order, some of nobody's or of a dropped unit."""
    layouts: dict[int, UnitLayout] = {}
    spans: list[Span] = []
    for key in draw(st.lists(st.integers(0, 9), unique=True, max_size=4)):
        lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
        bounds = st.none() | st.integers(-14, 14)
        kept = Positions(draw(bounds), draw(bounds)) if draw(st.booleans()) else ALL_POSITIONS
        layouts[key] = UnitLayout.plan(key, key + 100, "a", lengths, kept)
        for prompt, length in enumerate(lengths):
            if length and draw(st.booleans()):
                position = draw(st.integers(0, length - 1))
                spans.append(Span(key, prompt, position, draw(st.integers(1, length - position))))
    spans += [Span(None, 0, 0, n) for n in draw(st.lists(st.integers(1, 5), max_size=2))]
    spans += [Span(77, 0, 0, n) for n in draw(st.lists(st.integers(1, 5), max_size=2))]
    return draw(st.permutations(spans)), layouts


def is_kept(layout: UnitLayout, name: tuple[int, int, int]) -> bool:
    _, prompt, position = name
    first = layout.first_position[prompt]
    return bool(first <= position < first + layout.num_rows[prompt])


@given(st.integers(0, 20), st.none() | st.integers(-25, 25), st.none() | st.integers(-25, 25))
def test_positions_are_kept_as_a_slice_keeps_them(length, start, stop) -> None:
    first, count = Positions(start, stop).of(length)
    assert list(range(first, first + count)) == list(range(length))[start:stop]


def test_a_layout_holds_kept_positions_back_to_back() -> None:
    layout = UnitLayout.plan(0, 0, "a", [5, 1, 0, 3], Positions(-2, None))
    assert layout.num_rows.tolist() == [2, 1, 0, 2]
    assert layout.first_row.tolist() == [0, 2, NOT_RUN, 3]
    assert layout.first_position.tolist() == [3, 0, 0, 1]
    assert layout.prompt_at(4) == (3, 2)


@given(steps())
def test_every_row_lands_where_its_prompt_and_position_say(step) -> None:
    spans, layouts = step
    plan = plan_step(spans, layouts)
    names = [(s.unit, s.prompt, s.position + i) for s in spans for i in range(s.num_rows)]
    slab = np.arange(len(names))
    staged = slab if plan.index is None else slab[plan.index]
    wanted = {name for name in names if name[0] in layouts and is_kept(layouts[name[0]], name)}
    assert plan.num_rows == len(wanted) == sum(run.num_rows for run in plan.runs)
    if plan.runs:
        assert len(staged) == plan.num_rows
    seen = set()
    next_staged = 0
    for run in plan.runs:
        assert run.staged == next_staged
        next_staged += run.num_rows
        layout = layouts[run.unit]
        for place in range(run.num_rows):
            unit, prompt, position = names[staged[run.staged + place]]
            assert unit == run.unit
            kept = position - layout.first_position[prompt]
            assert layout.first_row[prompt] + kept == run.row + place
            assert layout.prompt_at(run.row + place) == (prompt, position)
            seen.add((unit, prompt, position))
    assert seen == wanted


@given(steps())
def test_runs_are_as_long_as_can_be(step) -> None:
    runs = plan_step(*step).runs
    for left, right in pairwise(runs):
        assert (left.unit, left.row + left.num_rows) < (right.unit, right.row)


def test_a_slab_in_order_needs_no_index() -> None:
    layout = UnitLayout.plan(0, 0, "a", [3, 0, 2])
    plan = plan_step([Span(0, 0, 0, 3), Span(0, 2, 0, 2)], {0: layout})
    assert plan.index is None
    assert len(plan.runs) == 1
    swapped = plan_step([Span(0, 2, 0, 2), Span(0, 0, 0, 3)], {0: layout})
    assert swapped.index.tolist() == [2, 3, 4, 0, 1]


@pytest.mark.parametrize("span", [Span(0, 0, 2, 2), Span(0, 1, 0, 1), Span(0, 0, -1, 1)])
def test_a_row_of_nobody_is_an_error(span: Span) -> None:
    with pytest.raises(RowsMissing, match="unit 7"):
        plan_step([span], {0: UnitLayout.plan(0, 7, "a", [3, 0])})


def test_a_prompt_that_does_not_run_has_no_rows() -> None:
    layout = UnitLayout.plan(0, 0, "a", [0, 4, 0, 1])
    assert layout.first_row.tolist() == [NOT_RUN, 0, NOT_RUN, 4]
    assert layout.total_rows == 5
