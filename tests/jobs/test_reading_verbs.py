"""`attnstore query` and `export`, as typed: answers, files and exit codes."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from jobs.cli import app
from store import open_run
from store.objects.local import LocalStore
from tests.store import sample_run
from tests.store.sample_run import SampleShape, plan_tables, write_run


@pytest.fixture
def folder(tmp_path) -> str:
    write_run(LocalStore(tmp_path / "run"), SampleShape(), [[40, 0, 7], [1, 30]])
    return str(tmp_path / "run")


def answer(*words: str, code: int = 0) -> bytes:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.stdout_bytes if code == 0 else result.stderr_bytes


def test_a_listing_has_one_line_a_prompt_whatever_its_id_is(tmp_path, monkeypatch) -> None:
    def with_ids(lengths: list[list[int]]) -> dict[str, pa.Table]:
        tables = plan_tables(lengths)
        table, ids = tables["prompts"], ["a\nb\t9\tstored", "\x1b[31mred", "\u202eé 猫"]
        place = table.column_names.index("prompt_id")
        table = table.set_column(place, table.schema.field(place), pa.array(ids))
        return {**tables, "prompts": table}

    monkeypatch.setattr(sample_run, "plan_tables", with_ids)
    write_run(LocalStore(tmp_path), SampleShape(), [[4, 7, 2]])
    listed = answer("ls", str(tmp_path)).decode().splitlines()
    assert [line.split("\t")[0] for line in listed] == [
        r"a\nb\t9\tstored", r"\x1b[31mred", r"\u202eé 猫",
    ]  # fmt: skip
    shown = answer("query", str(tmp_path), "select prompt_id from prompts").decode()
    assert r"\x1b[31mred" in shown
    assert "\x1b" not in shown


def test_an_id_that_is_no_text_is_not_found(folder, tmp_path) -> None:
    id_ = b"\xff".decode(errors="surrogateescape")
    words = ["show", folder, "--layer", "0", "--head", "0", "--out", str(tmp_path / "x.png")]
    assert b"there is no prompt '\\udcff'" in answer(*words, "--prompt", id_, code=2)


def test_query_in_every_format(folder, tmp_path) -> None:
    sql = "select prompt_id, num_tokens from prompts where status = 'stored' order by 2 desc"
    table = answer("query", folder, sql).decode()
    assert table.split() == [
        "prompt_id",
        "num_tokens",
        "p0",
        "40",
        "p4",
        "30",
        "p2",
        "7",
        "p3",
        "1",
    ]
    lines = answer("query", folder, sql, "--json").decode().splitlines()
    assert json.loads(lines[0]) == {"prompt_id": "p0", "num_tokens": 40}
    assert answer("query", folder, sql, "--format", "csv").decode().splitlines()[1] == '"p0",40'
    data = answer("query", folder, sql, "--format", "parquet")
    assert pq.read_table(io.BytesIO(data))["prompt_id"].to_pylist() == ["p0", "p4", "p2", "p3"]
    out = tmp_path / "answer.csv"
    answer("query", folder, sql, "--format", "csv", "--out", str(out))
    assert out.read_text().count("\n") == 5


TWICE = "select a.prompt_id, b.prompt_id, b.num_tokens as prompt_id_1 from prompts a, prompts b"
PAIR = f"{TWICE} where a.prompt_id = 'p0' and b.prompt_id = 'p2'"
ROW = {"prompt_id": "p0", "prompt_id_2": "p2", "prompt_id_1": 7}


def test_names_that_repeat_are_told_apart_alike_in_every_format(folder, tmp_path) -> None:
    table = open_run(folder).sql(PAIR)
    assert table.to_pylist() == [ROW]
    assert answer("query", folder, PAIR).decode().split() == [*ROW, "p0", "p2", "7"]
    assert json.loads(answer("query", folder, PAIR, "--json")) == ROW
    text = answer("query", folder, PAIR, "--format", "csv").decode()
    assert list(csv.DictReader(io.StringIO(text))) == [{**ROW, "prompt_id_1": "7"}]
    data = answer("query", folder, PAIR, "--format", "parquet")
    assert pq.read_table(io.BytesIO(data)).to_pylist() == [ROW]
    out = tmp_path / "table.txt"
    answer("query", folder, PAIR, "--out", str(out))
    assert out.read_text().split() == [*ROW, "p0", "p2", "7"]


def test_nested_values_are_json_in_csv(folder) -> None:
    sql = "select [1, 2] as some, {'a': 'x', 'b': [0.5]} as deep, null::int[] as none, 3 as plain"
    text = answer("query", folder, sql, "--format", "csv").decode()
    (row,) = csv.DictReader(io.StringIO(text))
    assert json.loads(row["some"]) == [1, 2]
    assert json.loads(row["deep"]) == {"a": "x", "b": [0.5]}
    assert (row["none"], row["plain"]) == ("", "3")


def test_what_is_no_number_is_null_in_json(folder) -> None:
    sql = "select 'nan'::float as a, [1.0, '-inf'::double] as b, {'c': 'nan'::double} as d, 2.5 e"

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    line = answer("query", folder, sql, "--json")
    found = json.loads(line, parse_constant=refuse)
    assert {**found, "e": 2.5} == {"a": None, "b": [1.0, None], "d": {"c": None}, "e": 2.5}


def test_sums_and_decimals_are_numbers_in_json(folder) -> None:
    sql = "select sum(num_tokens) s, 1.25 d, 100::hugeint p, 0.1234567890123456789 e from prompts"
    found = json.loads(answer("query", folder, sql, "--json"))
    assert found == {"s": 78, "d": 1.25, "p": 100, "e": "0.1234567890123456789"}
    assert type(found["s"]) is int


@pytest.mark.parametrize("form", ["table", "csv", "parquet", "json"])
@pytest.mark.parametrize(
    "value",
    [
        "interval 3 days", "map {'a': 1}", "'2020-01-01'::timestamptz", "'x'::blob",
        "uuid()", "1::hugeint", "1.5::decimal(9, 2)", "'infinity'::timestamp", "null",
        "time '1:00'",
        "'a'::enum('a', 'b')", "true", "interval 1 month", "'010'::bit", "'infinity'::date",
    ],
)  # fmt: skip
def test_every_type_is_answered_or_refused_with_a_message(folder, form, value) -> None:
    words = ["query", folder, f"select {value} as x", "--format", form]
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (0, 2), result.exception
    if result.exit_code:
        assert "attnstore: QueryRefused: " in result.stderr


def test_a_folder_that_is_missing_is_a_message(folder, tmp_path) -> None:
    out = str(tmp_path / "nowhere" / "answer.csv")
    told = answer("query", folder, "select 1", "--format", "csv", "--out", out, code=2).decode()
    assert told.startswith("attnstore: ")
    assert out in told


def test_query_refusals_are_messages(folder) -> None:
    assert b"tables: prompts(" in answer("query", folder, "select x from prompts", code=2)
    assert b"there are table, csv" in answer("query", folder, "select 1", "--format", "xml", code=2)


def test_text_of_a_run_is_never_markup(folder) -> None:
    shown = answer("query", folder, "select '[red]x[/nope]' as \"[bold]\"").decode()
    assert "[red]x[/nope]" in shown
    assert "[bold]" in shown


@pytest.mark.parametrize("place", ["file/out", "n" * 300])
def test_a_path_that_cannot_be_written_is_a_message(folder, tmp_path, place) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / place)
    words = (
        ("export", folder, "--to", "numpy", "--out", out),
        ("query", folder, "select 1", "--format", "csv", "--out", out),
        ("show", folder, "--prompt", "p0", "--layer", "0", "--head", "0", "--out", f"{out}.png"),
    )
    for command in words:
        told = answer(*command, code=2).decode()
        assert told.startswith("attnstore: ")
        assert str(tmp_path) in told


def test_export(folder, tmp_path) -> None:
    out = str(tmp_path / "out")
    body = json.loads(
        answer("export", folder, "--to", "numpy", "--out", out, "--where", "num_tokens > 20",
               "--site", "z", "--layer", "1", "--json")
    )  # fmt: skip
    assert body["prompts"] == 2
    assert np.load(tmp_path / "out" / "prompt-00000001.npz")["z"].shape == (1, 4, 30, 16)
    assert b"is already there" in answer("export", folder, "--to", "numpy", "--out", out, code=2)
    other = str(tmp_path / "other")
    assert b"there is no export to 'csv'" in answer(
        "export", folder, "--to", "csv", "--out", other, code=2
    )
    assert b"failed: empty prompt" in answer(
        "export", folder, "--to", "numpy", "--out", other, "--prompt", "p1", code=2
    )
