"""One Parquet file of a run: written whole, checked whole before Arrow sees a byte of it."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from store import keys
from store.checksum import crc32c, hex_crc32c
from store.errors import DamagedObject, FormatError, ObjectNotFound
from store.objects.protocol import ObjectStore
from store.run_format import PlanFile

MAX_FILE_BYTES = 4 << 30
ROW_GROUP_ROWS = 65_536
SMALL_FILE_BYTES = 1 << 20
"""Waking Arrow's threads for a file like this takes longer than decoding it."""


def write_parquet(objects: ObjectStore, prefix: str, name: str, table: pa.Table) -> PlanFile:
    """Put `table` as `prefix + name` and return its record."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP_ROWS)
    data = sink.getvalue()
    objects.put(prefix + name, [data])
    return PlanFile(
        name=name, bytes=len(data), crc32c=hex_crc32c(crc32c(data)), rows=table.num_rows
    )


def read_parquet(
    objects: ObjectStore,
    prefix: str,
    file: PlanFile,
    columns: Sequence[str] | None = None,
    without: Sequence[str] = (),
) -> pa.Table:
    """Return the file's table: all columns or the named ones, never `without`.

    Raises `DamagedObject` if the bytes are not those of the record, `FormatError` if they are no
    such table.
    """
    name = prefix + keys.checked_name(file.name)
    if file.bytes > MAX_FILE_BYTES:
        raise FormatError(f"{name} states {file.bytes} bytes, {MAX_FILE_BYTES} are allowed")
    try:
        data = objects.get(name, max_bytes=file.bytes)
    except ObjectNotFound as error:
        raise DamagedObject(f"{name} is missing; run `attnstore verify`") from error
    actual = hex_crc32c(crc32c(data))
    if len(data) != file.bytes or actual != file.crc32c:
        raise DamagedObject(
            f"{name}: {len(data)} bytes of crc32c {actual} where the manifest says {file.bytes} "
            "and "
            f"{file.crc32c}; run `attnstore verify`"
        )
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as opened:
            held = opened.schema_arrow.names
            kept = [column for column in columns or held if column not in without]
            if not set(kept) <= set(held):
                raise FormatError(f"{name} holds the columns {held}, not all of {kept}")
            table = opened.read(kept, use_threads=len(data) > SMALL_FILE_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{name} is not readable as Parquet: {error}") from error
    if table.num_rows != file.rows:
        raise FormatError(f"{name} has {table.num_rows} rows where the manifest says {file.rows}")
    return table
