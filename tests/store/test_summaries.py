"""Summaries kept beside a run: saved, replaced, joined, and never able to reach outside it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from store.errors import DamagedObject, FormatError, QueryRefused
from store.objects.local import LocalStore
from store.run import Run, open_run
from store.sealed_json import seal, unseal
from store.summaries import SUMMARIES
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
    run.save_summary("split", pa.table({"prompt_id": ["p0"], "v": [1]}))
    with pytest.raises(QueryRefused, match="already have a column 'split'"):
        run.where("split = 'train'")


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
