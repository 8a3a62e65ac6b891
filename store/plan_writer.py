"""Writes a plan segment as a stream: one Parquet file of prompts after another, the manifest last.

Holds one file's worth of prompts at a time, so a segment may have any number of them. Never knows
a model or a tokenizer. Files stay small (about four million tokens), because a worker that takes up
a unit reads the file that holds its prompts. A file's name has the SHA-256 of its bytes in it: two
writers of one segment never write each other's files, whichever of them gets the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from store import keys
from store.checksum import crc32c, hex_crc32c
from store.errors import FormatError, ObjectExists
from store.objects.protocol import ObjectStore
from store.plan import MANIFEST, PROMPT_FIELDS, UNIT_FIELDS, read_manifest
from store.plan_contents import PlanDigest
from store.run_format import PlanFile, PlanInput, PlanManifest

PROMPTS_PER_FILE = 100_000
TOKENS_PER_FILE = 4 << 20
UNITS_PER_FILE = 1 << 20
_NAMED_DIGITS = 32


class SegmentWriter:
    """Writes segment number `segment`. Safe to repeat: the same prompts give the same segment."""

    def __init__(self, objects: ObjectStore, *, run_id: str, segment: int) -> None:
        self._objects = objects
        self._run_id = run_id
        self._segment = segment
        self._prefix = keys.plan_prefix(segment)
        self._digest = PlanDigest()
        self._files: list[PlanFile] = []
        self._num_prompts = 0

    def add_prompts(self, prompts: pa.Table) -> None:
        """Write one more file of prompts: `PROMPT_FIELDS`, then any metadata columns."""
        _check_columns(prompts, PROMPT_FIELDS)
        self._digest.add_prompts(prompts)
        self._files.append(self._write(f"prompts-{len(self._files):05d}", prompts))
        self._num_prompts += prompts.num_rows

    def finish(
        self,
        units: pa.Table,
        inputs: Sequence[PlanInput] = (),
        planned: Callable[[], None] = lambda: None,
    ) -> PlanManifest:
        """Write the units (`UNIT_FIELDS`, covering the prompts in order) and the manifest.

        `planned` is called when all but the manifest is written, and may refuse it.
        Raises `FormatError` if the units do not fit the prompts or another plan holds the segment.
        """
        _check_columns(units, UNIT_FIELDS)
        first_unit, first_prompt, num_tokens = _check_units(units, self._num_prompts)
        self._digest.add_units(units, UNIT_FIELDS.names)
        unit_files = [
            self._write(f"units-{number:05d}", units.slice(start, UNITS_PER_FILE))
            for number, start in enumerate(range(0, units.num_rows, UNITS_PER_FILE))
        ]
        manifest = PlanManifest(
            run_id=self._run_id,
            segment=self._segment,
            first_prompt=first_prompt,
            num_prompts=self._num_prompts,
            num_tokens=num_tokens,
            first_unit=first_unit,
            num_units=units.num_rows,
            plan_hash=self._digest.hexdigest(),
            inputs=list(inputs),
            prompts=self._files,
            units=unit_files,
        )
        self._objects.sync(self._prefix)
        planned()
        return self._created(manifest)

    def _created(self, manifest: PlanManifest) -> PlanManifest:
        try:
            self._objects.create(self._prefix + MANIFEST, manifest.to_bytes())
        except ObjectExists:
            existing = read_manifest(self._objects, self._segment)
            if existing.plan_hash != manifest.plan_hash or existing.run_id != self._run_id:
                raise FormatError(
                    f"plan segment {self._segment} holds another plan "
                    f"({existing.plan_hash[:12]}, this one is {manifest.plan_hash[:12]}), made by "
                    "another driver at the same time; nothing of it was changed. Run the same "
                    "command again to go on from it"
                ) from None
            return existing
        return manifest

    def _write(self, stem: str, table: pa.Table) -> PlanFile:
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", row_group_size=16_384)
        data = sink.getvalue()
        name = f"{stem}-{hashlib.sha256(data).hexdigest()[:_NAMED_DIGITS]}.parquet"
        self._objects.put(self._prefix + name, [data])
        checksum = hex_crc32c(crc32c(data))
        return PlanFile(name=name, bytes=len(data), crc32c=checksum, rows=table.num_rows)


def write_segment(
    objects: ObjectStore,
    *,
    run_id: str,
    segment: int,
    prompts: pa.Table,
    units: pa.Table,
    inputs: Sequence[PlanInput] = (),
) -> PlanManifest:
    """Write one segment whose prompts are at hand as one table, and return its manifest."""
    writer = SegmentWriter(objects, run_id=run_id, segment=segment)
    for start in range(0, prompts.num_rows, PROMPTS_PER_FILE):
        writer.add_prompts(prompts.slice(start, PROMPTS_PER_FILE))
    return writer.finish(units, inputs)


def _check_columns(table: pa.Table, fields: pa.Schema) -> None:
    for field in fields:
        known = field.name in table.column_names
        if not known or table.schema.field(field.name).type != field.type:
            raise FormatError(f"a plan needs the column {field.name} of type {field.type}")


def _check_units(units: pa.Table, num_prompts: int) -> tuple[int, int, int]:
    """Return first unit, first prompt and number of tokens of units that follow one another."""
    if not units.num_rows:
        raise FormatError("a plan segment needs at least one unit")
    unit, first, count, tokens = (units[name].to_numpy() for name in UNIT_FIELDS.names)
    ends = first + count
    wrong = np.flatnonzero((unit[1:] != unit[:-1] + 1) | (first[1:] != ends[:-1]))
    if wrong.size:
        raise FormatError(f"unit {unit[wrong[0] + 1]} does not follow the units before it")
    if ends[-1] - first[0] != num_prompts:
        raise FormatError(f"the units cover {ends[-1] - first[0]} prompts, there are {num_prompts}")
    return int(unit[0]), int(first[0]), int(tokens.sum())
