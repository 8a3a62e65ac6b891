"""The plan of a run: its prompts and units as Parquet, in segments that are each written once.

A segment's manifest is written last and states the size and checksum of every Parquet file, so a
segment is there whole or not at all, and a flipped byte is found before Arrow sees it. A run that
is extended gets another segment. It never knows a model or a tokenizer: token ids come in as data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count, pairwise

import pyarrow as pa

from store import keys
from store.errors import CannotList, DamagedObject, FormatError, ObjectNotFound
from store.objects.protocol import ObjectStore
from store.parquet_file import read_parquet
from store.plan_contents import coverage_problem, prompts_problem, units_problem
from store.run_format import PlanFile, PlanManifest
from store.sealed_json import MAX_JSON_BYTES

PROMPT_FIELDS = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("token_strings", pa.list_(pa.string()), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("plan_reason", pa.string()),
    ]
)
"""Columns of a prompts table; metadata columns follow. A `plan_reason` says why not to run it."""

UNIT_FIELDS = pa.schema(
    [
        pa.field("unit", pa.int64(), nullable=False),
        pa.field("first_prompt", pa.int64(), nullable=False),
        pa.field("num_prompts", pa.int64(), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),
    ]
)
"""Columns of a units table: contiguous prompts, numbered over the whole run."""

MANIFEST = "manifest.json"
FIRST_MANIFEST = f"{keys.plan_prefix(0)}{MANIFEST}"
_SEGMENT_MANIFEST = re.compile(r"plan/(\d{4,})/manifest\.json")


def read_manifest(objects: ObjectStore, segment: int) -> PlanManifest:
    """Return one segment's manifest. Raises `ObjectNotFound` if the segment is not complete."""
    name = keys.plan_prefix(segment) + MANIFEST
    manifest = PlanManifest.from_bytes(objects.get(name, max_bytes=MAX_JSON_BYTES), name)
    if manifest.segment != segment:
        raise DamagedObject(f"{name} says it is segment {manifest.segment}; run `attnstore verify`")
    return manifest


def read_segments(objects: ObjectStore) -> list[PlanManifest]:
    """Return the manifests of all complete segments in order; one listing and one read each."""
    try:
        numbers = sorted(
            int(match[1])
            for info in objects.list(keys.PLAN)
            if (match := _SEGMENT_MANIFEST.fullmatch(info.name))
        )
        manifests = [read_manifest(objects, number) for number in numbers]
    except CannotList:
        manifests = list(_leading_segments(objects))
    first = manifests[0] if manifests else None
    if first is not None and (first.segment, first.first_unit, first.first_prompt) != (0, 0, 0):
        raise DamagedObject(
            f"{FIRST_MANIFEST} is missing, though plan segment {first.segment} is there: restore "
            "it from a copy of the run; run `attnstore verify`"
        )
    for before, after in pairwise(manifests):
        if (after.first_unit, after.first_prompt) != (
            before.first_unit + before.num_units,
            before.first_prompt + before.num_prompts,
        ):
            raise FormatError(
                f"plan segment {after.segment} does not continue segment {before.segment}"
            )
    return manifests


def missing_segment(segments: Sequence[PlanManifest], sign: str) -> str:
    """Return what to say where `sign` shows that a plan had a segment after these, now lost."""
    planned = sum(segment.num_units for segment in segments)
    return (
        f"{keys.plan_prefix(len(segments))}{MANIFEST} is missing, though {sign}, beyond the "
        f"{planned} units that are planned"
    )


def _leading_segments(objects: ObjectStore) -> Iterator[PlanManifest]:
    for number in count():
        try:
            yield read_manifest(objects, number)
        except ObjectNotFound:
            return


def read_prompts(
    objects: ObjectStore,
    manifest: PlanManifest,
    columns: Sequence[str] | None = None,
    *,
    without: Sequence[str] = (),
) -> pa.Table:
    """Return a segment's prompts in plan order: all columns or the named ones, never `without`.

    Every file is read and checked whole; the columns decide what stays in memory.
    """
    tables = [_read_prompts(objects, manifest, file, columns, without) for file in manifest.prompts]
    return join_tables(tables)


def read_units(objects: ObjectStore, manifest: PlanManifest) -> pa.Table:
    """Return a segment's units in order.

    Raises `FormatError` where they do not follow one another or do not cover its prompts.
    """
    prefix, start, tables = keys.plan_prefix(manifest.segment), manifest.first_unit, []
    for file in manifest.units:
        table = read_parquet(objects, prefix, file)
        _refuse(units_problem(table, UNIT_FIELDS, range(start, start + file.rows)), prefix, file)
        tables.append(table)
        start += file.rows
    whole = join_tables(tables or [UNIT_FIELDS.empty_table()])
    if whole.num_rows != manifest.num_units:
        raise FormatError(
            f"plan segment {manifest.segment} has {whole.num_rows} units, its manifest says "
            f"{manifest.num_units}; run `attnstore verify`"
        )
    problem = coverage_problem(whole, manifest.first_prompt, manifest.num_prompts)
    if problem is not None:
        raise FormatError(f"plan segment {manifest.segment} {problem}; run `attnstore verify`")
    return whole


def read_prompt_range(
    objects: ObjectStore,
    manifest: PlanManifest,
    first_prompt: int,
    num_prompts: int,
    columns: Sequence[str],
) -> pa.Table:
    """Return `num_prompts` prompts from run-wide number `first_prompt`, reading only their files.

    Raises `FormatError` where the segment does not hold all of them.
    """
    start, parts = manifest.first_prompt, []
    for place, file in enumerate(manifest.prompts):
        low = max(first_prompt, start)
        high = min(first_prompt + num_prompts, start + file.rows)
        if low < high:
            part = read_prompt_file(objects, manifest, place, columns)
            parts.append(part.slice(low - start, high - low))
        start += file.rows
    found = sum(part.num_rows for part in parts)
    if found != num_prompts:
        raise FormatError(
            f"plan segment {manifest.segment} holds {found} of the {num_prompts} prompts from "
            f"{first_prompt}; run `attnstore verify`"
        )
    return join_tables(parts)


def join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Return tables as one; a column that differs in type has a type that holds all exactly.

    Text where there is no other: metadata come as each file's own values allow.
    """
    if len(tables) == 1:
        return tables[0]
    for name in dict.fromkeys(name for table in tables for name in table.column_names):
        if len({t.schema.field(name).type for t in tables if name in t.column_names}) > 1:
            tables = _of_one_type(tables, name)
    return pa.concat_tables(tables, promote_options="permissive")


def _of_one_type(tables: Sequence[pa.Table], name: str) -> list[pa.Table]:
    columns = [table[name] if name in table.column_names else None for table in tables]
    filled = [c for c in columns if c is not None and c.null_count < len(c)]
    try:
        parts = [pa.table({name: column}) for column in filled]
        kind = pa.concat_tables(parts, promote_options="permissive").schema.field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        kind = pa.string()  # no type in common, or one that would change a value
    return [
        table
        if column is None
        else table.set_column(table.column_names.index(name), name, _as(column, kind))
        for table, column in zip(tables, columns, strict=True)
    ]


def _as(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.null_count == len(column):
        return pa.chunked_array([pa.nulls(len(column), kind)])
    return column.cast(kind)


def read_prompt_file(
    objects: ObjectStore, manifest: PlanManifest, place: int, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return the prompts of the segment's file number `place`."""
    return _read_prompts(objects, manifest, manifest.prompts[place], columns)


def _read_prompts(
    objects: ObjectStore,
    manifest: PlanManifest,
    file: PlanFile,
    columns: Sequence[str] | None,
    without: Sequence[str] = (),
) -> pa.Table:
    prefix = keys.plan_prefix(manifest.segment)
    table = read_parquet(objects, prefix, file, columns, without)
    read = PROMPT_FIELDS.names if columns is None else columns
    due = [field for field in PROMPT_FIELDS if field.name in read and field.name not in without]
    _refuse(prompts_problem(table, pa.schema(due)), prefix, file)
    return table


def _refuse(problem: str | None, prefix: str, file: PlanFile) -> None:
    if problem is not None:
        raise FormatError(f"{prefix}{file.name} {problem}; run `attnstore verify`")
