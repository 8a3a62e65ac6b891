"""SQL over a run's tables, and that it reaches nothing else."""

from __future__ import annotations

import pyarrow as pa
import pytest

from store.errors import PromptNotFound, QueryRefused
from store.objects.local import LocalStore
from store.run import Run, open_run
from tests.store import sample_run
from tests.store.sample_run import (
    SampleShape,
    capture,
    plan_tables,
    sample_units,
    write_manifests,
)

LENGTHS = [[30, 0, 7], [1, 52], [5]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("queried")
    objects, shape = LocalStore(folder), SampleShape()
    write_manifests(objects, shape, LENGTHS)
    for unit in sample_units(shape, LENGTHS)[:2]:
        capture(objects, shape, unit)
    return open_run(str(folder))


def test_where_gives_ids_in_plan_order(run: Run) -> None:
    assert run.where("split = 'train' and num_tokens < 40") == ["p0", "p2"]
    assert run.where("status = 'stored' or status = 'pending'") == ["p0", "p2", "p3", "p4", "p5"]
    assert run.where("reason is not null") == ["p1"]
    assert run.where("false") == []
    ids = run.where("status = 'stored' and num_tokens > 5")
    (batch,) = list(run.batches(["z"], prompts=ids, size=1000))
    assert len(batch) == 89


def test_where_keeps_the_plans_order_whatever_the_metadata_is_called(tmp_path, monkeypatch) -> None:
    def with_rows(lengths: list[list[int]]) -> dict[str, pa.Table]:
        tables = plan_tables(lengths)
        table = tables["prompts"]
        for name in ("_row", "__ROW"):
            table = table.append_column(name, pa.array(range(table.num_rows, 0, -1)))
        return {**tables, "prompts": table}

    monkeypatch.setattr(sample_run, "plan_tables", with_rows)
    write_manifests(LocalStore(tmp_path), SampleShape(), LENGTHS)
    run = open_run(str(tmp_path))
    assert run.where("true") == [f"p{row}" for row in range(6)]
    assert run.where("_row < 3 and __row > 0") == ["p4", "p5"]


def test_a_condition_may_end_in_a_comment(run: Run) -> None:
    assert run.where("num_tokens > 40 -- long ones") == ["p4"]


def test_sql_over_prompts_tokens_and_units(run: Run) -> None:
    counts = run.sql("select status, count(*) as n from prompts group by 1 order by 1")
    assert counts.to_pylist() == [
        {"status": "failed", "n": 1},
        {"status": "pending", "n": 1},
        {"status": "stored", "n": 4},
    ]
    top = run.sql(
        "select token, count(*) as n from tokens group by 1 order by n desc, token limit 1"
    )
    assert top.to_pylist() == [{"token": "t0", "n": 5}]
    assert run.sql("select sum(rows) as rows from units").to_pylist() == [{"rows": 90}]


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('/etc/passwd')",
        "copy prompts to '/tmp/attnstore-leak.csv'",
        "install httpfs",
        "attach '/tmp/attnstore-leak.db'",
        "set enable_external_access = true",
        "select * from run",
        "select nonsense from prompts",
        "selec",
    ],
)
def test_nothing_else_is_reachable(run: Run, query: str) -> None:
    with pytest.raises(QueryRefused):
        run.sql(query)


def test_a_wrong_column_lists_the_columns(run: Run) -> None:
    with pytest.raises(QueryRefused, match="prompt_id, num_tokens, status, reason, text, split"):
        run.where("kind = 'code'")
    with pytest.raises(PromptNotFound):
        run.batches(["z"], prompts=["p9"])
