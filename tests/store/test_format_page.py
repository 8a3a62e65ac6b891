"""docs/format.md names every member of every document, and every column of every Parquet file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from store import run_format
from store.checks import SelfCheckFigures
from store.committed_units import COLUMNS
from store.generated import GENERATED_FIELDS
from store.plan import PROMPT_FIELDS, UNIT_FIELDS
from store.run_format import Outcome, Site
from store.summaries import SummaryManifest

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
MODELS = [
    model
    for model in vars(run_format).values()
    if isinstance(model, type) and issubclass(model, run_format.BaseModel)
] + [SelfCheckFigures, SummaryManifest]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_member_is_on_the_page(model):
    missing = [name for name in model.model_fields if not re.search(rf"\b{name}\b", PAGE)]
    assert missing == []


def test_every_column_and_value_is_on_the_page():
    names = [*COLUMNS, *PROMPT_FIELDS.names, *UNIT_FIELDS.names, *GENERATED_FIELDS.names]
    names += [*Outcome, *Site, "bfloat16", "float16", "float32", "uint8", "raw", "fast", "small"]
    assert [name for name in names if not re.search(rf"\b{name}\b", PAGE)] == []
