"""The plan's tables as a reader loads them: what is read when, over files and segments."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from store import plan_tables
from store.errors import PromptNotFound
from store.objects.local import LocalStore
from store.plan import read_segments
from store.plan_tables import PlanTables
from store.plan_writer import write_segment
from tests.store.sample_run import RUN_ID
from tests.store.sample_run import plan_tables as sample_tables


class CountingStore(LocalStore):
    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.gets: list[str] = []

    def get(self, name, *, max_bytes):
        self.gets.append(name)
        return super().get(name, max_bytes=max_bytes)


@pytest.fixture
def tables(tmp_path, monkeypatch) -> tuple[CountingStore, PlanTables]:
    """Two segments of two files each: 5 prompts in 2 units, then 3 more in one."""
    monkeypatch.setattr("store.plan_writer.PROMPTS_PER_FILE", 2)
    objects = CountingStore(tmp_path)
    first = sample_tables([[3, 4], [5, 6, 7]])
    write_segment(objects, run_id=RUN_ID, segment=0, **first)
    more = sample_tables([[8, 9, 1]])
    units = more["units"].set_column(0, "unit", pa.array([2], pa.int64()))
    units = units.set_column(1, "first_prompt", pa.array([5], pa.int64()))
    write_segment(objects, run_id=RUN_ID, segment=1, prompts=more["prompts"], units=units)
    objects.gets.clear()
    segments = read_segments(objects)
    objects.gets.clear()
    return objects, PlanTables(objects, segments)


LENGTHS = [3, 4, 5, 6, 7, 8, 9, 1]


@pytest.mark.parametrize("small", [True, False])
def test_tokens_and_units_over_files_and_segments(tables, small, monkeypatch) -> None:
    objects, plan = tables
    if not small:
        monkeypatch.setattr(plan_tables, "SMALL_PLAN_TOKENS", 0)
    assert objects.gets == []
    assert plan.num_prompts == 8
    assert plan.prompts()["num_tokens"].to_pylist() == LENGTHS
    assert "token_ids" not in plan.prompts().column_names
    unit, place = plan.units_of(np.arange(8))
    assert unit.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert place.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    objects.gets.clear()
    for row, length in enumerate(LENGTHS):
        ids, strings = plan.tokens(row)
        assert ids.tolist() == list(range(length))
        assert strings == [f"t{i}" for i in range(length)]
        assert ids.dtype == np.int32
    assert (objects.gets == []) == small
    assert len(objects.gets) == len(set(objects.gets))
    objects.gets.clear()
    plan.tokens(0)
    assert objects.gets == []


def test_rows_that_are_not_there(tables, monkeypatch) -> None:
    _, plan = tables
    monkeypatch.setattr(plan_tables, "SMALL_PLAN_TOKENS", 0)
    with pytest.raises(PromptNotFound, match="the run has 8"):
        plan.tokens(8)


def test_a_run_without_a_plan_yet(tmp_path) -> None:
    plan = PlanTables(LocalStore(tmp_path), [])
    assert plan.prompts().num_rows == 0
    assert plan.num_units == 0
