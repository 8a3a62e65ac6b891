"""What a model said: `generated.parquet` of an attempt, one row per prompt that was continued.

The rows of a continued prompt are its own tokens and the generated ones but the last, which was
sampled and never fed to the model. Written by the worker that commits the unit, read with the
prompt's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from store import keys
from store.checksum import crc32c_of_parts, hex_crc32c
from store.errors import DamagedObject, FormatError, ObjectNotFound
from store.objects.protocol import ObjectStore
from store.replaced import why_gone
from store.run_format import Commit

GENERATED: Final = "generated.parquet"

GENERATED_FIELDS: Final = pa.schema(
    [
        pa.field("prompt", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("token_strings", pa.list_(pa.string()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens generated after one prompt, with the log-probability of each when it was chosen.

    `finish_reason` is `stop` where the model ended by itself (its last token is then the end
    token), `length` where it was cut.
    """

    token_ids: tuple[int, ...]
    token_strings: tuple[str, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


def generated_bytes(continuations: Sequence[tuple[int, Continuation]]) -> bytes:
    """Return `generated.parquet` of (place in the unit, continuation) pairs, ascending."""
    table = pa.table(
        {
            "prompt": [place for place, _ in continuations],
            "token_ids": [list(one.token_ids) for _, one in continuations],
            "token_strings": [list(one.token_strings) for _, one in continuations],
            "logprobs": [list(one.logprobs) for _, one in continuations],
            "finish_reason": [one.finish_reason for _, one in continuations],
        },
        schema=GENERATED_FIELDS,
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def read_generated(objects: ObjectStore, commit: Commit) -> dict[int, Continuation]:
    """Return the unit's continuations by place; empty where it was captured without generation.

    Raises `DamagedObject` where the stored bytes are not those that the commit names, or gone.
    """
    record = next((one for one in commit.objects if one.name == GENERATED), None)
    if record is None:
        return {}
    name = keys.attempt_prefix(commit.unit, commit.attempt) + GENERATED
    try:
        data = objects.get(name, max_bytes=record.bytes)
    except ObjectNotFound as error:
        raise DamagedObject(why_gone(objects, name)) from error
    if len(data) != record.bytes or hex_crc32c(crc32c_of_parts([data])) != record.crc32c:
        raise DamagedObject(f"{name} is not what was committed; run `attnstore verify`")
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{name} is not readable as Parquet: {error}") from error
    if not table.schema.equals(GENERATED_FIELDS):
        raise FormatError(f"{name} has columns {table.schema.names}, not those of format version 1")
    return {
        row["prompt"]: Continuation(
            tuple(row["token_ids"]),
            tuple(row["token_strings"]),
            tuple(row["logprobs"]),
            row["finish_reason"],
        )
        for row in table.to_pylist()
    }
