"""`attnstore query`: SQL over a run's tables, printed or written. Never knows how it is stored."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.one_line import one_line
from store import open_run
from store.errors import QueryRefused

SHOWN_ROWS = 200


class QueryFormat(StrEnum):
    """How an answer is given."""

    TABLE = "table"
    CSV = "csv"
    PARQUET = "parquet"
    JSON = "json"


def parse_format(text: str) -> QueryFormat:
    """Return a format by its name. Raises `QueryRefused` naming all of them."""
    try:
        return QueryFormat(text)
    except ValueError:
        raise QueryRefused(
            f"there is no format {text!r}; there are {', '.join(QueryFormat)}"
        ) from None


def query(
    run_url: str,
    sql: str,
    *,
    form: QueryFormat = QueryFormat.TABLE,
    out: Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Answer `sql` on standard output, or into `out`. JSON is one object a line.

    A table on the terminal shows 200 rows and says how many more there are. Parquet is bytes: it
    goes to `out` or into a pipe.
    """
    answer = open_run(run_url, options).sql(sql)
    if form is QueryFormat.TABLE and out is None:
        with _as_told(form):
            table = as_rich(answer)
        Console(width=None if sys.stdout.isatty() else 200).print(table)
        if answer.num_rows > SHOWN_ROWS:
            sys.stdout.write(
                f"... {answer.num_rows - SHOWN_ROWS} more rows; --format csv has all\n"
            )
        return
    data = rendered(answer, form)
    if out is not None:
        out.write_bytes(data)
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


@contextmanager
def _as_told(form: QueryFormat) -> Iterator[None]:
    """Raise `QueryRefused` for a value that a format, or Python, has no place for."""
    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise QueryRefused(
            f"the answer cannot be given as {form}: {error}; cast the column, such as "
            "column::varchar, or choose another format"
        ) from error


def rendered(answer: pa.Table, form: QueryFormat) -> bytes:
    """Return an answer's bytes in a format; a table is plain text of all rows.

    Lists, structs and maps are JSON text in CSV. JSON has no NaN and no infinity: they are null.
    """
    with _as_told(form):
        return _rendered(answer, form)


def _rendered(answer: pa.Table, form: QueryFormat) -> bytes:
    if form is QueryFormat.CSV:
        sink = io.BytesIO()
        pa_csv.write_csv(_flat(answer), sink)
        return sink.getvalue()
    if form is QueryFormat.PARQUET:
        sink = io.BytesIO()
        pq.write_table(answer, sink)
        return sink.getvalue()
    if form is QueryFormat.JSON:
        return "".join(f"{_json(row)}\n" for row in answer.to_pylist()).encode()
    text = io.StringIO()
    Console(file=text, width=200).print(as_rich(answer, answer.num_rows))
    return text.getvalue().encode()


def _flat(answer: pa.Table) -> pa.Table:
    """Return a table whose nested columns are JSON text."""
    columns = [
        pa.array([None if v is None else _json(v) for v in column.to_pylist()], pa.string())
        if pa.types.is_nested(column.type)
        else column
        for column in answer.columns
    ]
    return pa.table(columns, names=answer.column_names)


def _json(value: Any) -> str:
    return json.dumps(_finite(value), ensure_ascii=False, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return a value with None for every number in it that JSON cannot say.

    Decimals (sums are some) are numbers too, and text where a float would not say them exactly.
    """
    if isinstance(value, Decimal):
        if value == value.to_integral_value():
            return int(value)
        return float(value) if Decimal(str(float(value))) == value else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return [_finite(inner) for inner in value]
    return value


def as_rich(answer: pa.Table, rows: int = SHOWN_ROWS) -> Table:
    """Return a table to print. Cells are plain text: nothing in a run is taken as markup."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for field in answer.schema:
        numeric = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        table.add_column(Text(field.name), justify="right" if numeric else "left")
    for row in answer.slice(0, rows).to_pylist():
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return one_line(text.replace("\n", "↵").replace("\t", "⇥"))
