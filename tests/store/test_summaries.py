"""Summaries kept beside a run: saved, replaced, joined, and never able to reach outside it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from store.errors import DamagedObject, FormatError, QueryRefused
from store.objects.local import LocalStore
from store.parquet_file import write_parquet
from store.run import Run, open_run
from store.sealed_json import seal, unseal
from store.summaries import SUMMARIES, SummaryManifest
from store.verify import verify_run
from tests.store.sample_run import SampleShape, write_run


@pytest.fixture
def run(tmp_path) -> Run:
    write_run(LocalStore(tmp_path), SampleShape(), [[40, 0, 7], [1, 30]])
    return open_run(str(tmp_path))


def test_one_row_a_prompt_becomes_a_column(run: Run) -> None:
    scores = run.head_scores("previous_token", per_prompt=True)
    best = run.sql("select prompt_id, max(score) as best from s group by 1", s=scores)
    run.save_summary("previous", best)
    again = open_run(run.url)
    assert again.summaries == ("previous",)
    want = {row["prompt_id"]: row["best"] for row in best.to_pylist()}
    assert want.pop("p3") is None  # one token, and so no query that counts
    got = again.sql("select prompt_id, previous from prompts where previous is not null")
    assert {row["prompt_id"]: row["previous"] for row in got.to_pylist()} == want
    assert again.where("previous > 2 or previous is null") == ["p1", "p3"]
    assert "previous" not in again.prompts.column_names


def test_longer_ones_become_tables_and_several_columns_get_a_prefix(run: Run) -> None:
    run.save_summary("heads", run.head_scores("entropy", per_prompt=True))
    count = run.sql("select count(*) as n from heads join prompts using (prompt_id)")
    assert count["n"].to_pylist() == [4 * 2 * 4]
    run.save_summary("two", pa.table({"prompt_id": ["p4"], "a": [1], "b": [2]}))
    assert run.sql("select two_a + two_b as s from prompts order by two_a nulls last limit 1")[
        "s"
    ].to_pylist() == [3]


def test_saving_again_replaces(run: Run) -> None:
    for value in (1, 2):
        run.save_summary("mark", pa.table({"prompt_id": ["p0"], "value": [value]}))
    assert run.where("mark = 2") == ["p0"]
    assert run.where("mark = 1") == []


@pytest.mark.parametrize("name", ["prompts", "Tokens", "a b", "1a", "../x", "x;drop", "", "x" * 70])
def test_names_that_sql_could_not_use_are_refused(run: Run, name: str) -> None:
    with pytest.raises(QueryRefused, match="cannot name a summary"):
        run.save_summary(name, pa.table({"prompt_id": ["p0"], "v": [1]}))


def test_what_has_no_prompts_or_clashes_is_refused(run: Run) -> None:
    with pytest.raises(QueryRefused, match="needs a prompt_id column"):
        run.save_summary("x", pa.table({"v": [1]}))
    for name in ("split", "status", "Reason"):
        with pytest.raises(QueryRefused, match=f"already have a column '{name}'"):
            run.save_summary(name, pa.table({"prompt_id": ["p0"], "v": [1]}))
    run.save_summary("mark", pa.table({"prompt_id": ["p0"], "v": [1]}))
    with pytest.raises(QueryRefused, match="summary 'mark', which SQL takes for 'Mark'"):
        run.save_summary("Mark", pa.table({"prompt_id": ["p0"], "v": [1]}))
    assert run.summaries == ("mark",)


UNJOINABLE = {
    "prompt_id of int64": pa.table({"prompt_id": [0, 1], "v": [1, 2]}),
    "the column 'v' twice": pa.table([["p0"], [1], [2]], names=["prompt_id", "v", "V"]),
    "the column 'prompt_id' twice": pa.table([["p0"], ["p1"]], names=["prompt_id"] * 2),
    "needs a prompt_id column": pa.table({"v": [1]}),
}


@pytest.mark.parametrize("problem", UNJOINABLE)
def test_a_table_that_cannot_be_joined_is_refused_at_save_and_by_name_when_read(
    run: Run, tmp_path, problem: str
) -> None:
    with pytest.raises(QueryRefused, match=f"summary 's' .*{problem}"):
        run.save_summary("s", UNJOINABLE[problem])
    assert run.summaries == ()
    saved(run, tmp_path, "s", UNJOINABLE[problem])
    for call in (lambda: run.where("s = 1"), lambda: run.sql("select s_v from prompts")):
        with pytest.raises(FormatError, match=f"summary 's' .*{problem}"):
            call()
    assert run.where("status = 'stored' and split = 'train'") == ["p0", "p2", "p4"]
    (found,) = verify_run(LocalStore(tmp_path), deep=True).problems
    assert problem in found.message


def saved(run: Run, folder, name: str, table: pa.Table) -> None:
    """Save what `save_summary` refuses, as an older or another writer may have."""
    objects, prefix = LocalStore(folder), f"{SUMMARIES}{name}/"
    file = write_parquet(objects, prefix, "0123456789abcdef.parquet", table)
    manifest = SummaryManifest(run_id=run.id, name=name, created="2026-01-01", file=file)
    objects.put(f"{SUMMARIES}{name}.json", [manifest.to_bytes()])


def test_a_column_of_the_prompts_goes_before_a_summary_of_its_name(run: Run, tmp_path) -> None:
    saved(run, tmp_path, "status", pa.table({"prompt_id": ["p0"], "v": [1]}))
    with pytest.warns(RuntimeWarning, match="column 'status' of the summary 'status' is left out"):
        assert run.where("status = 'failed'") == ["p1"]


def test_two_summaries_that_give_one_column_are_named(run: Run) -> None:
    run.save_summary("a_b", pa.table({"prompt_id": ["p0"], "v": [1]}))
    run.save_summary("a", pa.table({"prompt_id": ["p0"], "b": [1], "c": [2]}))
    with pytest.raises(QueryRefused, match="'a' and 'a_b' both give a column 'a_b'"):
        run.where("a_b = 1")


def test_a_summary_is_read_where_its_whole_name_stands(run: Run, tmp_path) -> None:
    run.save_summary("s", pa.table({"prompt_id": ["p0"], "v": [1]}))
    next((tmp_path / SUMMARIES / "s").iterdir()).write_bytes(b"")
    assert run.where("split = 'train' and status = 'stored'") == ["p0", "p2", "p4"]
    assert run.sql("select sum(num_tokens) as n from prompts")["n"].to_pylist() == [78]
    for query in ("s = 1", "S is null", "s_v = 1", '"s" = 1'):
        with pytest.raises(DamagedObject):
            run.where(query)


def test_ids_of_another_string_type_and_without_a_value_are_joined(run: Run) -> None:
    ids = pa.array(["p4", None]).dictionary_encode()
    run.save_summary("mark", pa.table({"prompt_id": ids, "v": [7, 8]}))
    assert run.where("mark = 7") == ["p4"]


def test_damage_shows(run: Run, tmp_path) -> None:
    run.save_summary("mark", pa.table({"prompt_id": ["p0"], "value": [1]}))
    path = next((tmp_path / SUMMARIES / "mark").iterdir())
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedObject):
        run.where("mark = 1")
    assert run.where("num_tokens = 40") == ["p0"]


def test_one_of_another_run_is_refused(run: Run, tmp_path) -> None:
    run.save_summary("mark", pa.table({"prompt_id": ["p0"], "value": [1]}))
    objects, name = LocalStore(tmp_path), f"{SUMMARIES}mark.json"
    body = unseal(objects.get(name, max_bytes=1 << 20), name)
    objects.put(name, [seal(body | {"run_id": "f" * 16})])
    for call in (lambda: run.where("mark = 1"), lambda: run.sql("select mark from prompts")):
        with pytest.raises(FormatError, match=f"belongs to run {'f' * 16}"):
            call()
    assert run.where("num_tokens = 40") == ["p0"]
