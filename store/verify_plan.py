"""Whether a plan's files are what its manifests say, and what commits can be held against.

A file that cannot be read is one problem, which also says what was not checked for want of it:
every other file still stands for its own prompts and units.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from store import keys
from store.errors import FormatError, ObjectNotFound, RunError, StoreError
from store.objects.protocol import ObjectStore
from store.parquet_file import read_parquet
from store.plan import MANIFEST, PROMPT_FIELDS, UNIT_FIELDS, read_segments
from store.planned_units import FileTokens, PlannedUnits, kept_positions
from store.run_format import PlanFile, PlanManifest, RunManifest
from store.verify_report import VerifyReport


def check_plan(
    objects: ObjectStore, run: RunManifest | None, report: VerifyReport, *, deep: bool
) -> PlannedUnits | None:
    """Check the plan's files; return its units as far as they can be read, None if not at all."""
    try:
        plans = read_segments(objects)
    except (RunError, ObjectNotFound) as error:
        report.add(keys.PLAN, f"{error}; no commit was held against the plan")
        return None
    tables: list[pa.Table] = []
    tokens: list[FileTokens] = []
    unread: list[range] = []
    for plan in plans:
        prefix = keys.plan_prefix(plan.segment)
        if run is not None and plan.run_id != run.run_id:
            report.add(prefix, f"belongs to run {plan.run_id}, not {run.run_id}")
        for message in _sums(plan):
            report.add(prefix + MANIFEST, message)
        listed = {info.name[len(prefix) :]: info.bytes for info in objects.list(prefix)}
        for file, units in _with_rows(plan.units, plan.first_unit):
            table = _read(objects, prefix, file, listed, UNIT_FIELDS)
            if isinstance(table, pa.Table):
                tables.append(table)
            else:
                unread.append(units)
                report.add(
                    prefix + file.name,
                    f"{table}; commits of units {_span(units)} were not held against the plan",
                )
        for file, rows in _with_rows(plan.prompts, plan.first_prompt):
            table = _read(objects, prefix, file, listed, PROMPT_FIELDS if deep else None)
            if isinstance(table, pa.Table):
                counts = np.asarray(table["num_tokens"].to_numpy(), np.int32)
                tokens.append(FileTokens(rows.start, counts))
            elif table is not None:
                not_checked = f"; rows of prompts {_span(rows)} were not held against the plan"
                report.add(prefix + file.name, table + (not_checked if deep else ""))
        report.objects += len(plan.prompts) + len(plan.units)
        report.bytes += sum(file.bytes for file in [*plan.prompts, *plan.units])
    kept = None if run is None else kept_positions(run.config)
    return PlannedUnits.of(tables, tokens, kept, unread)


def _read(
    objects: ObjectStore,
    prefix: str,
    file: PlanFile,
    listed: dict[str, int],
    fields: pa.Schema | None,
) -> pa.Table | str | None:
    """Return the file's table, or what is wrong with it. Without `fields` only its size counts."""
    found = listed.get(file.name)
    if found != file.bytes:
        return f"has {found} bytes, not {file.bytes}"
    if fields is None:
        return None
    try:
        table = read_parquet(objects, prefix, file)
        for field in fields:
            held = table.schema.field(field.name) if field.name in table.column_names else None
            if held is None or held.type != field.type:
                raise FormatError(f"has no column {field.name} of type {field.type}")
            if not field.nullable and table[field.name].null_count:
                raise FormatError(f"has empty cells in its column {field.name}")
    except (RunError, StoreError) as error:
        return str(error)
    return table


def _with_rows(files: list[PlanFile], start: int) -> Iterator[tuple[PlanFile, range]]:
    """Yield each file with the run-wide numbers of its rows."""
    for file in files:
        yield file, range(start, start + file.rows)
        start += file.rows


def _sums(plan: PlanManifest) -> Iterator[str]:
    for what, files, stated in (
        ("prompts", plan.prompts, plan.num_prompts),
        ("units", plan.units, plan.num_units),
    ):
        held = sum(file.rows for file in files)
        if held != stated:
            yield f"names files of {held} {what} in all, and says {stated}"


def _span(numbers: range) -> str:
    return f"{numbers.start} to {numbers.stop - 1}"
