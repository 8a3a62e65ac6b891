"""A stretch of a plan's prompts is read from the files that hold it, and never comes short."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from store.errors import FormatError
from store.objects.open import open_store
from store.parquet_file import read_parquet, write_parquet
from store.plan import read_prompt_range, read_segments
from store.plan_writer import write_segment
from tests.store.sample_run import RUN_ID, plan_tables


def test_a_range_of_prompts_is_read_alone(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path / "run"))
    write_segment(objects, run_id=RUN_ID, segment=0, **plan_tables([[3, 5], [2, 4, 6]]))
    (manifest,) = read_segments(objects)
    table = read_prompt_range(objects, manifest, 1, 3, ["prompt_id", "num_tokens"])
    assert table.to_pydict() == {"prompt_id": ["p1", "p2", "p3"], "num_tokens": [5, 2, 4]}
    with pytest.raises(FormatError, match="holds 1 of the 2 prompts from 4"):
        read_prompt_range(objects, manifest, 4, 2, ["prompt_id"])


def test_a_column_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path))
    record = write_parquet(objects, "plan/", "a.parquet", pa.table({"a": [1], "b": [2]}))
    assert read_parquet(objects, "plan/", record, ["b"]).to_pydict() == {"b": [2]}
    with pytest.raises(FormatError, match=r"holds the columns \['a', 'b'\]"):
        read_parquet(objects, "plan/", record, ["a", "c"])
