"""Tables that analysts computed from a run and keep beside it, for SQL in later sessions.

Knows Arrow tables and names; never knows how they were computed. A summary is derived: it is
replaced by saving it again, and a run without any reads the same. Its manifest is put after its
Parquet, under a name no other save uses, so a reader sees the old table or the new one.
"""

from __future__ import annotations

import re
import secrets
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
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


def save_summary(
    objects: ObjectStore, run_id: str, name: str, table: pa.Table, columns: Collection[str] = ()
) -> None:
    """Keep `table`, which has a `prompt_id` column, as the run's summary `name`.

    Replaces one of the same name. Raises `QueryRefused` for a name that SQL could not use or that
    would hide one of `columns`, those of the prompts, and for a table that could not be joined.
    """
    _check_name(name)
    problem = summary_problem(table)
    if problem is not None:
        raise QueryRefused(f"summary {name!r} {problem}")
    table = table.set_column(
        table.column_names.index("prompt_id"), "prompt_id", table["prompt_id"].cast(pa.string())
    )
    held = {column.lower() for column in columns}
    for label in _labels(name, table).values():
        if label.lower() in held:
            raise QueryRefused(
                f"the prompts already have a column {label!r}; save the summary under another name"
            )
    for other in list_summaries(objects):
        if other != name and other.lower() == name.lower():
            raise QueryRefused(f"there is a summary {other!r}, which SQL takes for {name!r}")
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
    table = read_parquet(objects, f"{SUMMARIES}{name}/", manifest.file)
    problem = summary_problem(table)
    if problem is not None:
        raise FormatError(f"{key}: summary {name!r} {problem}; save it again or delete it")
    return table


def summary_problem(table: pa.Table) -> str | None:
    """Return why a table cannot be joined to the prompts, or None."""
    names = table.column_names
    if "prompt_id" not in names:
        return f"needs a prompt_id column; it has {names}"
    doubled = sorted(name for name, n in Counter(one.lower() for one in names).items() if n > 1)
    if doubled:
        return f"has the column {doubled[0]!r} twice, as SQL reads names"
    kind = table.schema.field("prompt_id").type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return f"has a prompt_id of {kind}; give the prompts' ids, which are strings"
    return None


def is_named_in(query: str, name: str) -> bool:
    """Whether a query names a summary, or a column `name_...` as one of several columns gives."""
    return re.search(rf"\b{name}(?:\b|_)", query, re.IGNORECASE) is not None


def with_summaries(prompts: pa.Table, summaries: Mapping[str, pa.Table]) -> pa.Table:
    """Return the prompts table with the columns of summaries that have one row a prompt.

    A summary `s` of one value column gives the column `s`, one of several gives `s_<column>`.
    Prompts that it lacks get nulls. Longer summaries are tables of their own in SQL. A column of
    the prompts goes before one of a summary, which is left out with a warning. Raises
    `QueryRefused` where two summaries give a column.
    """
    joined = prompts
    own = {column.lower() for column in prompts.column_names}
    given: dict[str, str] = {}
    for name, table in summaries.items():
        if not is_per_prompt(table):
            continue
        places = pc.index_in(
            prompts["prompt_id"], value_set=table["prompt_id"].cast(prompts["prompt_id"].type)
        )
        for column, label in _labels(name, table).items():
            if label.lower() in own:
                warnings.warn(
                    f"the column {label!r} of the summary {name!r} is left out, for the prompts "
                    "have one of this name; save it under another",
                    RuntimeWarning,
                    stacklevel=4,
                )
                continue
            other = given.setdefault(label.lower(), name)
            if other != name:
                raise QueryRefused(
                    f"the summaries {other!r} and {name!r} both give a column {label!r}; save one "
                    "of them under another name"
                )
            joined = joined.append_column(label, table[column].take(places))
    return joined


def _labels(name: str, table: pa.Table) -> dict[str, str]:
    """Return the columns that a summary with one row a prompt gives, by its own columns' names."""
    if not is_per_prompt(table):
        return {}
    values = [column for column in table.column_names if column != "prompt_id"]
    return {column: name if len(values) == 1 else f"{name}_{column}" for column in values}


def is_per_prompt(table: pa.Table) -> bool:
    """Whether no prompt has more than one row."""
    return bool(pc.count_distinct(table["prompt_id"], mode="all").as_py() == table.num_rows)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name.lower() in _TAKEN:
        raise QueryRefused(
            f"{name!r} cannot name a summary: give letters, digits and underscores, "
            f"and none of {', '.join(_TAKEN)}"
        )
