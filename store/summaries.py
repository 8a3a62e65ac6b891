"""Tables that analysts computed from a run and keep beside it, for SQL in later sessions.

Knows Arrow tables and names; never knows how they were computed. A summary is derived: it is
replaced by saving it again, and a run without any reads the same. Its manifest is put after its
Parquet, under a name no other save uses, so a reader sees the old table or the new one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from store.errors import FormatError, ObjectNotFound, QueryRefused
from store.objects.protocol import ObjectStore
from store.parquet_file import read_parquet, write_parquet
from store.run_format import Document, PlanFile
from store.sealed_json import MAX_JSON_BYTES

SUMMARIES = "summaries/"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_TAKEN = ("prompts", "tokens", "units")


class SummaryManifest(Document):
    """`summaries/<name>.json`: the current table of a summary."""

    kind: Literal["summary"] = "summary"
    run_id: str
    name: str
    created: str
    file: PlanFile


def save_summary(objects: ObjectStore, run_id: str, name: str, table: pa.Table) -> None:
    """Keep `table`, which has a `prompt_id` column, as the run's summary `name`.

    Replaces one of the same name. Raises `QueryRefused` for a name that SQL could not use.
    """
    _check_name(name)
    if "prompt_id" not in table.column_names:
        raise QueryRefused(f"a summary needs a prompt_id column; it has {table.column_names}")
    prefix = f"{SUMMARIES}{name}/"
    file = write_parquet(objects, prefix, f"{secrets.token_hex(8)}.parquet", table)
    manifest = SummaryManifest(
        run_id=run_id,
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        file=file,
    )
    objects.sync(prefix)
    objects.put(f"{SUMMARIES}{name}.json", [manifest.to_bytes()])


def list_summaries(objects: ObjectStore) -> list[str]:
    """Return the names of the run's summaries, sorted."""
    names = [info.name.removeprefix(SUMMARIES) for info in objects.list(SUMMARIES)]
    return sorted(n.removesuffix(".json") for n in names if n.endswith(".json") and "/" not in n)


def read_summary(objects: ObjectStore, run_id: str, name: str) -> pa.Table:
    """Return a summary's table. Raises `QueryRefused` if there is none, `DamagedObject`.

    Raises `FormatError` where it belongs to another run or summary.
    """
    _check_name(name)
    key = f"{SUMMARIES}{name}.json"
    try:
        data = objects.get(key, max_bytes=MAX_JSON_BYTES)
    except ObjectNotFound as error:
        held = ", ".join(list_summaries(objects)) or "none"
        raise QueryRefused(f"the run keeps no summary {name!r}; there are: {held}") from error
    manifest = SummaryManifest.from_bytes(data, key)
    if manifest.run_id != run_id:
        raise FormatError(
            f"{key} belongs to run {manifest.run_id}, not {run_id}; save it again or delete it"
        )
    if manifest.name != name:
        raise FormatError(f"{key} says it is summary {manifest.name!r}")
    return read_parquet(objects, f"{SUMMARIES}{name}/", manifest.file)


def with_summaries(prompts: pa.Table, summaries: Mapping[str, pa.Table]) -> pa.Table:
    """Return the prompts table with the columns of summaries that have one row a prompt.

    A summary `s` of one value column gives the column `s`, one of several gives `s_<column>`.
    Prompts that it lacks get nulls. Longer summaries are tables of their own in SQL.
    """
    joined = prompts
    for name, table in summaries.items():
        if not is_per_prompt(table):
            continue
        places = pc.index_in(prompts["prompt_id"], value_set=table["prompt_id"])
        values = [column for column in table.column_names if column != "prompt_id"]
        for column in values:
            label = name if len(values) == 1 else f"{name}_{column}"
            if label in joined.column_names:
                raise QueryRefused(f"the prompts already have a column {label!r}; rename a summary")
            joined = joined.append_column(label, table[column].take(places))
    return joined


def is_per_prompt(table: pa.Table) -> bool:
    """Whether no prompt has more than one row."""
    return bool(pc.count_distinct(table["prompt_id"]).as_py() == table.num_rows)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name.lower() in _TAKEN:
        raise QueryRefused(
            f"{name!r} cannot name a summary: give letters, digits and underscores, "
            f"and none of {', '.join(_TAKEN)}"
        )
