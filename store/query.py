"""SQL over a run's tables with DuckDB, in memory and closed to everything else.

Knows Arrow tables; never knows object stores: tables arrive through our own object layer, so DuckDB
needs no extension for S3 and may not touch files or the network. A query is data from a user, not
from a run, but a run's text may have been pasted into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from store.errors import PackageMissing, QueryRefused
from store.run_index import RunIndex
from store.unit_states import warn_of_damage

TOKEN_FIELDS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("pos", pa.int64()),
        ("token_id", pa.int32()),
        ("token", pa.string()),
    ]
)


def run_sql(
    query: str, tables: Mapping[str, pa.Table], more: Mapping[str, pa.Table] | None = None
) -> pa.Table:
    """Return the query's answer. Raises `QueryRefused` with DuckDB's reason and the tables.

    Columns of one name (of a join) get a number each after the first: `prompt_id`, `prompt_id_1`.
    """
    duckdb = _duckdb()
    everything = {**tables, **(more or {})}
    with _connect(duckdb) as connection:
        for name, table in everything.items():
            connection.register(name, table)
        try:
            answer = connection.sql(query)
            if answer is None:
                raise QueryRefused(f"{query!r} is no question: it gives no table")
            table = answer.to_arrow_table()
            return table.rename_columns(_told_apart(table.column_names))
        except duckdb.Error as error:
            columns = "; ".join(f"{n}({', '.join(t.column_names)})" for n, t in everything.items())
            raise QueryRefused(f"{error}\ntables: {columns}") from error


def matching_prompts(condition: str, prompts: pa.Table) -> list[str]:
    """Return the ids of the prompts that meet an SQL condition, in plan order."""
    row = "_row"
    while row in {name.lower() for name in prompts.column_names}:
        row = f"_{row}"
    numbered = prompts.append_column(row, pa.array(np.arange(prompts.num_rows)))
    # The line ends before the bracket, for the condition may end in a comment.
    query = f"select prompt_id from prompts where ({condition}\n) order by {row}"
    ids: list[str] = run_sql(query, {"prompts": numbered})["prompt_id"].to_pylist()
    return ids


def token_table(index: RunIndex) -> pa.Table:
    """Return every token of every prompt: prompt_id, pos, token_id, token.

    Of a prompt of a damaged unit only those that were planned, with a warning: what was generated
    after it is not known.
    """
    damaged = index.states.damaged()
    warn_of_damage(damaged, len(index.committed))
    units = index.units_of(np.arange(index.num_prompts)).tolist()
    ids = index.table()["prompt_id"]
    parts = []
    for row, unit in enumerate(units):
        token_ids, strings = index.tokens(row, planned=unit in damaged)
        count = len(token_ids)
        columns = [
            pa.repeat(ids[row], count),
            pa.array(np.arange(count)),
            pa.array(token_ids),
            pa.array(strings, pa.string()),
        ]
        parts.append(pa.table(columns, schema=TOKEN_FIELDS))
    return pa.concat_tables(parts) if parts else TOKEN_FIELDS.empty_table()


def unit_table(index: RunIndex) -> pa.Table:
    """Return the committed units: unit, num_prompts, stored, failed, rows, bytes and more."""
    warn_of_damage(index.states.unreadable(), len(index.committed))
    return pa.table(index.states.rows())


def _told_apart(names: Sequence[str]) -> list[str]:
    """Return names that differ; one that is there already is never taken by another column."""
    given, found = set(names), list[str]()
    for name in names:
        unique, number = name, 0
        while unique in found or (number and unique in given):
            number += 1
            unique = f"{name}_{number}"
        found.append(unique)
    return found


def _connect(duckdb: Any) -> Any:
    return duckdb.connect(
        ":memory:",
        config={
            "enable_external_access": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
            "lock_configuration": "true",
        },
    )


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise PackageMissing("queries need DuckDB: pip install 'attnstore[query]'") from error
    return duckdb
