"""Whether a plan's tables hold what the format says: types, tokens, units; and the plan's hash.

A plan may have been altered and sealed again, so every table is looked at as it is read: a token id
that does not fit its type would become another one without a word. Knows tables; reads nothing.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

READER_COLUMNS = frozenset(["status", "reason", "unit"])
"""Columns that readers add to the prompts table."""
HASHED_COLUMNS = ("prompt_id", "token_ids", "plan_reason")


class PlanDigest:
    """The SHA-256 over a segment's prompts and units, however Parquet stores them."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add_prompts(self, prompts: pa.Table) -> None:
        """Feed ids, token ids and reasons."""
        for batch in prompts.select(HASHED_COLUMNS).to_batches(4096):
            ids, reasons = batch.column(0).to_pylist(), batch.column(2).to_pylist()
            tokens = batch.column(1)
            offsets = tokens.offsets.to_numpy()
            values = tokens.values.to_numpy(zero_copy_only=False).astype("<i4")
            for place, (prompt_id, reason) in enumerate(zip(ids, reasons, strict=True)):
                own = values[offsets[place] : offsets[place + 1]]
                self._digest.update(repr((prompt_id, len(own), reason)).encode())
                self._digest.update(own.tobytes())

    def add_units(self, units: pa.Table, names: list[str]) -> None:
        """Feed all units of the segment, column by column."""
        for name in names:
            self._digest.update(np.ascontiguousarray(units[name].to_numpy(), "<i8").tobytes())

    def hexdigest(self) -> str:
        """Return the plan's hash."""
        return self._digest.hexdigest()


def columns_problem(table: pa.Table, fields: pa.Schema) -> str | None:
    """Return how a table's columns are not these fields, or None; it may have more of them."""
    for field in fields:
        if table.column_names.count(field.name) != 1:
            times = table.column_names.count(field.name)
            return f"has {times or 'no'} columns {field.name}"
        held = table.schema.field(field.name)
        if held.type != field.type:
            return f"has the column {field.name} as {held.type}, not as {field.type}"
        column = table[field.name]
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            return f"has unreadable cells in its column {field.name}: {error}"
        if not field.nullable and column.null_count:
            return f"has empty cells in its column {field.name}"
        if pa.types.is_list(field.type) and any(c.flatten().null_count for c in column.chunks):
            return f"has empty entries in its column {field.name}"
    return None


def prompts_problem(table: pa.Table, fields: pa.Schema) -> str | None:
    """Return what is wrong with prompts of these columns, or None."""
    problem = columns_problem(table, fields)
    if problem is not None:
        return problem
    names = table.column_names
    for name in names:
        if name in READER_COLUMNS or names.count(name) > 1:
            return f"has a metadata column {name}, which is the name of another column"
    counts: dict[str, NDArray[np.int32]] = {}
    for field in fields:
        if pa.types.is_list(field.type):
            counts[field.name] = pc.list_value_length(table[field.name]).to_numpy()
        elif field.name == "num_tokens":
            counts[field.name] = table[field.name].to_numpy()
    (first, expected), *others = counts.items() if counts else [("", np.empty(0, np.int32))]
    for name, found in others:
        wrong = np.flatnonzero(found != expected)
        if wrong.size:
            at = int(wrong[0])
            return f"has {expected[at]} as {first} of its prompt {at}, and {found[at]} as {name}"
    if "token_ids" in fields.names:
        lowest = pc.min(pc.list_flatten(table["token_ids"])).as_py()
        if lowest is not None and lowest < 0:
            return f"has the token id {lowest}"
    return None


def units_problem(table: pa.Table, fields: pa.Schema, units: range) -> str | None:
    """Return what is wrong with a table of these units, or None: they follow one another."""
    problem = columns_problem(table, fields)
    if problem is not None:
        return problem
    if table.num_rows != len(units):
        return f"has {table.num_rows} units, the manifest says {len(units)}"
    unit, first, count = (table[n].to_numpy() for n in ("unit", "first_prompt", "num_prompts"))
    wrong = np.flatnonzero(unit != np.arange(units.start, units.stop))
    if wrong.size:
        return f"has unit {unit[wrong[0]]} where unit {units[int(wrong[0])]} is due"
    wrong = np.flatnonzero(first[1:] != first[:-1] + count[:-1])
    if wrong.size:
        return f"has unit {unit[wrong[0] + 1]} from a prompt that does not follow the unit before"
    if count.size and (count.min() < 1 or first.min() < 0):
        return f"has unit {unit[np.argmin(count)]} of {count.min()} prompts"
    return None


def coverage_problem(units: pa.Table, first_prompt: int, num_prompts: int) -> str | None:
    """Return how all units of a segment, in order, do not cover its prompts, or None."""
    first, count = units["first_prompt"].to_numpy(), units["num_prompts"].to_numpy()
    start, end = (int(first[0]), int(first[-1] + count[-1])) if len(first) else (0, 0)
    if start != first_prompt or end != first_prompt + num_prompts:
        return (
            f"has units of prompts {start} to {end - 1}, the manifest says {first_prompt} to "
            f"{first_prompt + num_prompts - 1}"
        )
    return None


def id_digests(prompts: pa.Table) -> NDArray[np.uint64]:
    """Return a 128-bit digest of each prompt's id, [num_prompts, 2]."""
    ids = prompts["prompt_id"].to_pylist()
    data = b"".join(hashlib.blake2b(one.encode(), digest_size=16).digest() for one in ids)
    return np.frombuffer(data, "<u8").reshape(-1, 2)


def first_repeated(digests: NDArray[np.uint64]) -> int | None:
    """Return the place of the first id that was there before, or None."""
    order = np.lexsort((np.arange(len(digests)), digests[:, 1], digests[:, 0]))
    same = (digests[order[1:]] == digests[order[:-1]]).all(axis=1)
    repeats = order[1:][same]
    return int(repeats.min()) if repeats.size else None
