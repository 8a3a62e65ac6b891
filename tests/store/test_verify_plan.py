"""verify of a plan with a file that cannot be read: that file alone, and what it leaves open."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest

from store import keys, plan_writer
from store.objects.obstore_store import ObstoreStore
from store.parquet_file import write_parquet
from store.plan import MANIFEST, read_manifest
from store.sealed_json import MAX_JSON_BYTES
from store.verify import verify_run
from tests.store.sample_run import (
    SampleShape,
    capture,
    make_unit,
    plan_file,
    plan_tables,
    write_run,
)

LENGTHS = [[3, 4, 5], [6, 0, 7], [8, 9], [2, 1]]
PREFIX = keys.plan_prefix(0)


@pytest.fixture
def objects(monkeypatch):
    """A run whose plan has a file for every three prompts and every unit."""
    monkeypatch.setattr(plan_writer, "PROMPTS_PER_FILE", 3)
    monkeypatch.setattr(plan_writer, "UNITS_PER_FILE", 1)
    store = ObstoreStore(f"memory://verify-plan-{secrets.token_hex(4)}")
    write_run(store, SampleShape(), LENGTHS)
    assert verify_run(store, deep=True).ok
    return store


DAMAGES = {
    "gone": None,
    "short": lambda whole: whole[:-1],
    "flipped": lambda whole: whole[:-9] + b"x" + whole[-8:],
}


@contextmanager
def damaged(objects: ObstoreStore, name: str, how: str) -> Iterator[None]:
    whole, change = objects.get(name, max_bytes=1 << 20), DAMAGES[how]
    if change is None:
        objects.delete(name)
    else:
        objects.put(name, [change(whole)])
    yield
    objects.put(name, [whole])


@pytest.mark.parametrize("how", DAMAGES)
def test_one_prompts_file_is_one_problem(objects, how):
    for file, rows in enumerate(["0 to 2", "3 to 5", "6 to 8", "9 to 9"]):
        name = plan_file(objects, "prompts", file)
        with damaged(objects, name, how):
            (problem,) = verify_run(objects, deep=True).problems
            assert problem.name == name
            not_checked = f"; rows of prompts {rows} were not held against the plan"
            assert problem.message.endswith(not_checked)
            assert len(verify_run(objects).problems) == (how != "flipped")
    assert verify_run(objects, deep=True).ok


@pytest.mark.parametrize("how", DAMAGES)
def test_one_units_file_is_one_problem(objects, how):
    for file in range(4):
        name = plan_file(objects, "units", file)
        with damaged(objects, name, how):
            for deep in (False, True):
                (problem,) = verify_run(objects, deep=deep).problems
                assert problem.name == name
                expected = f"; commits of units {file} to {file} were not held against the plan"
                assert problem.message.endswith(expected)
    assert verify_run(objects, deep=True).ok


def test_what_the_other_files_say_is_still_held_against_the_commits(objects):
    shape = SampleShape()
    capture(objects, shape, make_unit(shape, 3, 8, [1, 2], seed=1), "a1", repair=1)
    capture(objects, shape, make_unit(shape, 9, 40, [1], seed=1))
    with (
        damaged(objects, plan_file(objects, "prompts"), "flipped"),
        damaged(objects, plan_file(objects, "units", 1), "flipped"),
    ):
        found = [(one.unit, one.message) for one in verify_run(objects, deep=True).problems]
    assert sorted(message for unit, message in found if unit is not None) == [
        "prompt 0 has 1 rows from position 0, the plan gives it 2 tokens",
        "prompt 1 has 2 rows from position 0, the plan gives it 1 tokens",
    ]
    assert len(found) == 5


@pytest.mark.parametrize("what", ["column", "type", "empty"])
@pytest.mark.parametrize("kind", ["prompts", "units"])
def test_a_table_of_another_form_is_a_problem_and_never_raises(kind, what):
    objects = ObstoreStore(f"memory://verify-plan-{secrets.token_hex(4)}")
    write_run(objects, SampleShape(), LENGTHS)
    table = plan_tables(LENGTHS)[kind]
    place = table.column_names.index("num_tokens")
    counts = table["num_tokens"].to_pylist()
    if what == "column":
        table = table.drop_columns(["num_tokens"])
    else:
        forged = [str(n) for n in counts] if what == "type" else [None, *counts[1:]]
        type_ = pa.string() if what == "type" else table.schema.field(place).type
        table = table.set_column(place, "num_tokens", pa.array(forged, type_))
    file = write_parquet(objects, PREFIX, f"{kind}-00000.parquet", table)
    manifest = read_manifest(objects, 0).model_copy(update={kind: [file]})
    objects.put(PREFIX + MANIFEST, [manifest.to_bytes()])
    (problem,) = verify_run(objects, deep=True).problems
    assert problem.name == PREFIX + file.name
    assert re.search("num_tokens", problem.message)


@pytest.mark.parametrize("count", ["num_prompts", "num_units"])
def test_sums_that_are_not_those_of_the_files(objects, count):
    manifest = read_manifest(objects, 0)
    more = manifest.model_copy(update={count: getattr(manifest, count) + 1})
    objects.put(PREFIX + MANIFEST, [more.to_bytes()])
    (problem,) = verify_run(objects).problems
    assert problem.name == PREFIX + MANIFEST
    assert re.search("names files of .* in all, and says", problem.message)


def test_a_manifest_that_is_unreadable_leaves_no_commit_held_against_the_plan(objects):
    whole = objects.get(PREFIX + MANIFEST, max_bytes=MAX_JSON_BYTES)
    objects.put(PREFIX + MANIFEST, [whole[:-1]])
    (problem,) = verify_run(objects, deep=True).problems
    assert problem.message.endswith("; no commit was held against the plan")
