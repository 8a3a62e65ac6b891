"""A stretch of a plan's prompts is read from the files that hold it, and never comes short."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.errors import FormatError
from store.objects.open import open_store
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
