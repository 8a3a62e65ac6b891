"""The plan of a run: its prompts and units as Parquet, in segments that are each written once.

A segment's manifest is written last and states the size and checksum of every Parquet file, so a
segment is there whole or not at all, and a flipped byte is found before Arrow sees it. A run that
is extended gets another segment. It never knows a model or a tokenizer: token ids come in as data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store import keys
from store.checksum import crc32c, hex_crc32c
from store.errors import DamagedObject, FormatError, ObjectExists, ObjectNotFound
from store.objects.protocol import ObjectStore
from store.run_format import PlanFile, PlanInput, PlanManifest
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

ROWS_PER_FILE = 100_000
MAX_FILE_BYTES = 4 << 30
MANIFEST = "manifest.json"
_SEGMENT_MANIFEST = re.compile(r"plan/(\d{4,})/manifest\.json")


def write_segment(
    objects: ObjectStore,
    *,
    run_id: str,
    segment: int,
    prompts: pa.Table,
    units: pa.Table,
    inputs: Sequence[PlanInput] = (),
    plan_hash: str | None = None,
) -> PlanManifest:
    """Write one segment and return its manifest; safe to repeat with the same tables.

    `prompts` has `PROMPT_FIELDS` and then any metadata columns; `units` has `UNIT_FIELDS` and
    covers the prompts in order. Raises `FormatError` for tables that do not fit together or if
    another plan holds the segment. `plan_hash` is `hash_of_plan` unless the caller has a better
    one.
    """
    _check_tables(prompts, units)
    prefix = keys.plan_prefix(segment)
    first_unit, first_prompt = units["unit"][0].as_py(), units["first_prompt"][0].as_py()
    manifest = PlanManifest(
        run_id=run_id,
        segment=segment,
        first_prompt=first_prompt,
        num_prompts=prompts.num_rows,
        num_tokens=pc.sum(units["num_tokens"]).as_py(),
        first_unit=first_unit,
        num_units=units.num_rows,
        plan_hash=plan_hash or hash_of_plan(prompts, units),
        inputs=list(inputs),
        prompts=_write_table(objects, prefix, "prompts", prompts),
        units=_write_table(objects, prefix, "units", units),
    )
    objects.sync(prefix)
    try:
        objects.create(prefix + MANIFEST, manifest.to_bytes())
    except ObjectExists:
        existing = read_manifest(objects, segment)
        if existing.plan_hash != manifest.plan_hash or existing.run_id != run_id:
            raise FormatError(
                f"plan segment {segment} holds another plan ({existing.plan_hash[:12]}, this one "
                "is "
                f"{manifest.plan_hash[:12]}); use another run location"
            ) from None
        return existing
    return manifest


def read_manifest(objects: ObjectStore, segment: int) -> PlanManifest:
    """Return one segment's manifest. Raises `ObjectNotFound` if the segment is not complete."""
    name = keys.plan_prefix(segment) + MANIFEST
    manifest = PlanManifest.from_bytes(objects.get(name, max_bytes=MAX_JSON_BYTES), name)
    if manifest.segment != segment:
        raise DamagedObject(f"{name} says it is segment {manifest.segment}; run `attnstore verify`")
    return manifest


def read_segments(objects: ObjectStore) -> list[PlanManifest]:
    """Return the manifests of all complete segments in order; one listing and one read each."""
    numbers = sorted(
        int(match[1])
        for info in objects.list(keys.PLAN)
        if (match := _SEGMENT_MANIFEST.fullmatch(info.name))
    )
    manifests = [read_manifest(objects, number) for number in numbers]
    for before, after in pairwise(manifests):
        if (after.first_unit, after.first_prompt) != (
            before.first_unit + before.num_units,
            before.first_prompt + before.num_prompts,
        ):
            raise FormatError(
                f"plan segment {after.segment} does not continue segment {before.segment}"
            )
    return manifests


def read_prompts(
    objects: ObjectStore, manifest: PlanManifest, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return a segment's prompts in plan order, all columns or the named ones."""
    return _read_table(objects, manifest, manifest.prompts, columns)


def read_units(objects: ObjectStore, manifest: PlanManifest) -> pa.Table:
    """Return a segment's units in order."""
    return _read_table(objects, manifest, manifest.units, None)


def hash_of_plan(prompts: pa.Table, units: pa.Table) -> str:
    """Return a sha256 over ids, token ids and units; independent of how Parquet stores them."""
    digest = hashlib.sha256()
    for batch in prompts.select(["prompt_id", "token_ids", "plan_reason"]).to_batches(
        max_chunksize=4096
    ):
        for row in batch.to_pylist():
            digest.update(repr((row["prompt_id"], row["token_ids"], row["plan_reason"])).encode())
    for row in units.select(UNIT_FIELDS.names).to_pylist():
        digest.update(repr(tuple(row.values())).encode())
    return digest.hexdigest()


def _check_tables(prompts: pa.Table, units: pa.Table) -> None:
    for table, fields in ((prompts, PROMPT_FIELDS), (units, UNIT_FIELDS)):
        for field in fields:
            if (
                field.name not in table.column_names
                or table.schema.field(field.name).type != field.type
            ):
                raise FormatError(f"a plan needs the column {field.name} of type {field.type}")
    if not units.num_rows:
        raise FormatError("a plan segment needs at least one unit")
    expected = units["first_prompt"][0].as_py()
    first_unit = units["unit"][0].as_py()
    for place, row in enumerate(units.to_pylist()):
        if row["unit"] != first_unit + place or row["first_prompt"] != expected:
            raise FormatError(f"unit {row['unit']} does not follow the units before it")
        expected += row["num_prompts"]
    if expected - units["first_prompt"][0].as_py() != prompts.num_rows:
        raise FormatError(
            f"the units cover {expected} prompts up to there, the table has {prompts.num_rows}"
        )


def _write_table(objects: ObjectStore, prefix: str, stem: str, table: pa.Table) -> list[PlanFile]:
    files = []
    for number, start in enumerate(range(0, max(table.num_rows, 1), ROWS_PER_FILE)):
        part = table.slice(start, ROWS_PER_FILE)
        sink = pa.BufferOutputStream()
        pq.write_table(part, sink, compression="zstd", row_group_size=16_384)
        data = sink.getvalue()
        name = f"{stem}-{number:05d}.parquet"
        objects.put(prefix + name, [data])
        files.append(
            PlanFile(
                name=name, bytes=len(data), crc32c=hex_crc32c(crc32c(data)), rows=part.num_rows
            )
        )
    return files


def _read_table(
    objects: ObjectStore,
    manifest: PlanManifest,
    files: Sequence[PlanFile],
    columns: Sequence[str] | None,
) -> pa.Table:
    tables = [
        _read_file(objects, keys.plan_prefix(manifest.segment), file, columns) for file in files
    ]
    return pa.concat_tables(tables, promote_options="permissive")


def _read_file(
    objects: ObjectStore, prefix: str, file: PlanFile, columns: Sequence[str] | None
) -> pa.Table:
    name = prefix + keys.checked_name(file.name)
    if file.bytes > MAX_FILE_BYTES:
        raise FormatError(
            f"{name} states {file.bytes} bytes, more than the {MAX_FILE_BYTES} allowed"
        )
    try:
        data = objects.get(name, max_bytes=file.bytes)
    except ObjectNotFound as error:
        raise DamagedObject(f"{name} is missing; run `attnstore verify`") from error
    if len(data) != file.bytes or hex_crc32c(crc32c(data)) != file.crc32c:
        raise DamagedObject(
            f"{name}: {len(data)} bytes of crc32c {hex_crc32c(crc32c(data))} where the manifest "
            "says "
            f"{file.bytes} and {file.crc32c}; run `attnstore verify`"
        )
    try:
        table = pq.read_table(
            pa.BufferReader(data), columns=None if columns is None else list(columns)
        )
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{name} is not readable as Parquet: {error}") from error
    if table.num_rows != file.rows:
        raise FormatError(f"{name} has {table.num_rows} rows where the manifest says {file.rows}")
    return table
