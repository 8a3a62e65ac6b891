"""Plans that were altered and sealed again, and commits of another plan than the one there."""

from __future__ import annotations

import pyarrow as pa
import pytest

from store import keys, open_run
from store.errors import FormatError
from store.objects.local import LocalStore
from store.parquet_file import write_parquet
from store.plan import MANIFEST, read_manifest, read_prompt_file, read_units
from store.plan_writer import write_segment
from store.verify import verify_run
from tests.store.sample_run import (
    RUN_ID,
    SampleShape,
    capture,
    plan_tables,
    sample_units,
    write_run,
)

LENGTHS = [[3, 5, 0, 1], [30, 7]]
PREFIX = keys.plan_prefix(0)


@pytest.fixture
def objects(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), LENGTHS)
    assert verify_run(objects, deep=True).problems == []
    return objects


def seal_again(objects, kind, change, **members) -> None:
    """Put a changed table of the plan, and the manifest that states it."""
    file = write_parquet(
        objects, PREFIX, f"{kind}-00000.parquet", change(plan_tables(LENGTHS)[kind])
    )
    manifest = read_manifest(objects, 0).model_copy(update={kind: [file], **members})
    objects.put(PREFIX + MANIFEST, [manifest.to_bytes()])


def column(name, values, type_=None):
    def change(table):
        array = pa.array(values, type_ or table.schema.field(name).type)
        return table.set_column(table.column_names.index(name), name, array)

    return change


def of_lengths(value):
    return [[value] * n for n in (3, 5, 0, 1, 30, 7)]


PROMPTS = {
    "too few token ids": column("token_ids", [[1]] * 6),
    "no token ids": column("token_ids", [None] * 6),
    "an empty token id": column("token_ids", of_lengths(None)),
    "a token id below zero": column("token_ids", of_lengths(-1)),
    "token ids beyond int32": column("token_ids", of_lengths(1 << 40), pa.list_(pa.int64())),
    "too few strings": column("token_strings", [["x"]] * 6),
    "no strings": column("token_strings", [None] * 6),
    "an empty string": column("token_strings", of_lengths(None)),
    "other lengths": column("num_tokens", [3, 5, 0, 1, 7, 30]),
    "lengths below zero": column("num_tokens", [-3, 5, 0, 1, 30, 7]),
    "no id": column("prompt_id", [None, "b", "c", "d", "e", "f"]),
    "ids that are numbers": column("prompt_id", [0, 1, 2, 3, 4, 5], pa.int64()),
    "a column of the reader's": lambda table: table.append_column("status", pa.array(["x"] * 6)),
    "ids twice": lambda table: table.append_column("prompt_id", pa.array(["x"] * 6)),
    "no text": lambda table: table.drop_columns(["text"]),
}
UNITS = {
    "overlapping": column("first_prompt", [0, 3]),
    "descending": lambda table: table.take([1, 0]),
    "renumbered": column("unit", [1, 0]),
    "beyond": column("unit", [0, 1 << 62]),
    "below zero": column("unit", [-1, 1]),
    "of another type": column("unit", [0, 1], pa.int32()),
    "empty cells": column("unit", [None, 1]),
    "of fewer prompts": column("num_prompts", [4, 1]),
    "of no prompts": column("num_prompts", [4, 0]),
}


@pytest.mark.parametrize("change", PROMPTS)
def test_prompts_that_do_not_hold_together_are_refused(objects, change):
    seal_again(objects, "prompts", PROMPTS[change])
    for read in (
        lambda run: run.tokens("p1"),
        lambda run: run.tokens(0),
        lambda run: run.prompts,
        lambda run: run.read("z", prompt=0, layer=0),
    ):
        with pytest.raises(FormatError, match="attnstore verify"):
            read(open_run(objects.url))
    with pytest.raises(FormatError, match="attnstore verify"):
        read_prompt_file(objects, read_manifest(objects, 0), 0)
    (problem, *_) = verify_run(objects, deep=True).problems
    assert problem.name == f"{PREFIX}prompts-00000.parquet"


@pytest.mark.parametrize("change", UNITS)
def test_units_that_do_not_hold_together_are_refused(objects, change):
    seal_again(objects, "units", UNITS[change])
    for read in (
        lambda run: run.tokens("p1"),
        lambda run: run.read("z", prompt=0, layer=0),
        lambda run: run.head_scores("entropy"),
    ):
        with pytest.raises(FormatError, match="attnstore verify"):
            read(open_run(objects.url))
    with pytest.raises(FormatError, match="attnstore verify"):
        read_units(objects, read_manifest(objects, 0))
    problems = verify_run(objects).problems
    assert {one.name for one in problems} & {f"{PREFIX}units-00000.parquet", PREFIX + MANIFEST}


def test_an_empty_table_of_units_is_refused(objects):
    seal_again(objects, "units", lambda table: table.slice(0, 0))
    with pytest.raises(FormatError, match="has 0 units, its manifest says 2"):
        open_run(objects.url).read("z", prompt=0)
    assert not verify_run(objects).ok


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (column("token_ids", of_lengths(9)), "says plan_hash"),
        (column("prompt_id", list("bacdef")), "says plan_hash"),
        (column("prompt_id", ["p0", "p0", "p2", "p3", "p4", "p5"]), "prompt 1 has the id of"),
    ],
    ids=["token ids", "ids", "an id twice"],
)
def test_other_prompts_of_the_same_lengths_are_found(objects, change, text):
    seal_again(objects, "prompts", change)
    assert any(text in one.message for one in verify_run(objects, deep=True).problems)


def test_an_id_that_another_segment_has_is_found(objects):
    tables = plan_tables([[2]])
    units = tables["units"].to_pydict() | {"unit": [2], "first_prompt": [6]}
    units = pa.table(units, schema=tables["units"].schema)
    write_segment(objects, run_id=RUN_ID, segment=1, prompts=tables["prompts"], units=units)
    (problem,) = verify_run(objects, deep=True).problems
    assert problem.message == "prompt 6 has the id of another one"


def test_rows_of_another_plan_are_never_given_to_its_prompts(objects):
    """The manifest was lost, and planned anew from other texts of as many tokens."""
    objects.delete(PREFIX + MANIFEST)
    tables = plan_tables(LENGTHS)
    tables["prompts"] = column("token_ids", of_lengths(9))(tables["prompts"])
    write_segment(objects, run_id=RUN_ID, segment=0, **tables)
    for prompt in (0, "p5"):
        with pytest.raises(FormatError, match="its rows are of other prompts"):
            open_run(objects.url).read("z", prompt=prompt)
    with pytest.raises(FormatError, match="its rows are of other prompts"):
        open_run(objects.url).head_scores("entropy")
    report = verify_run(objects)
    assert report.damaged_units == [0, 1]
    shape = SampleShape()
    for sample in sample_units(shape, LENGTHS):
        capture(objects, shape, sample, "again", repair=1)
    assert verify_run(objects, deep=True).ok
    assert open_run(objects.url).read("z", prompt=0).sizes["pos"] == 3
