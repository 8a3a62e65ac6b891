"""`attnstore query` and `export`, as typed: answers, files and exit codes."""

from __future__ import annotations

import io
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from jobs.cli import app
from store.objects.local import LocalStore
from tests.store.sample_run import SampleShape, write_run


@pytest.fixture
def folder(tmp_path) -> str:
    write_run(LocalStore(tmp_path / "run"), SampleShape(), [[40, 0, 7], [1, 30]])
    return str(tmp_path / "run")


def answer(*words: str, code: int = 0) -> bytes:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.stdout_bytes if code == 0 else result.stderr_bytes


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
