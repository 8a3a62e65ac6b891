"""Commits: the create-only documents that make attempts part of a run.

A unit has one commit per repair number and the highest counts. Of two attempts at one unit exactly
one commits; the other learns that it was superseded. A client that retries a commit whose answer
was lost meets its own commit, and is told that it won.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from store import keys
from store.codec import Codec
from store.errors import (
    CommitRefused,
    DamagedObject,
    FormatError,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    UnitNotFound,
)
from store.geometry import CHECKSUM_BYTES, ArrayGeometry
from store.objects.protocol import ObjectStore
from store.packed_pattern import num_entries
from store.run_format import ArrayRecord, Commit, Outcome
from store.sealed_json import MAX_JSON_BYTES
from store.shard_index import chunk_offsets

_LISTED_PROBLEMS = 5
_BLOSC_OVERHEAD = 16


@dataclass(frozen=True, slots=True)
class CommitResult:
    """Who holds the unit after a commit was tried."""

    won: bool
    attempt: str


def commit_unit(objects: ObjectStore, commit: Commit) -> CommitResult:
    """Make the attempt part of the run, once all its objects are there and durable.

    The commit must be complete in itself and agree with a listing of the attempt's folder. Safe to
    repeat. Raises `CommitRefused` if it does not, with what is wrong.
    """
    prefix = keys.attempt_prefix(commit.unit, commit.attempt)
    problems = commit_problems(commit)
    if not problems:
        listed = {info.name[len(prefix) :]: info.bytes for info in objects.list(prefix)}
        problems = list(missing_objects(commit, listed))
    if problems:
        raise CommitRefused(
            f"attempt {commit.attempt} at unit {commit.unit} is not complete, {len(problems)} "
            "problems: " + "; ".join(problems[:_LISTED_PROBLEMS]) + ". Capture the unit again."
        )
    objects.sync(prefix)
    if commit.repair:
        # Announced first, so that whoever skips complete folders never misses a repair in one.
        _announce(objects, commit.unit, commit.repair)
    key = keys.commit_key(commit.unit, commit.repair)
    try:
        objects.create(key, commit.to_bytes())
    except ObjectExists:
        holder = read_commit_leniently(objects, key).attempt
        return CommitResult(won=holder == commit.attempt, attempt=holder)
    except StoreError:
        # The answer may have been lost after the commit took effect: look before giving up.
        found = _holder_after_failure(objects, key)
        if found is None:
            raise
        return CommitResult(won=found == commit.attempt, attempt=found)
    return CommitResult(won=True, attempt=commit.attempt)


def _holder_after_failure(objects: ObjectStore, key: str) -> str | None:
    try:
        objects.size(key)
    except StoreError:
        return None
    return read_commit_leniently(objects, key).attempt


def committed_units(objects: ObjectStore) -> dict[int, str]:
    """Return unit -> name of its commit, the highest repair's, from one listing."""
    highest: dict[int, int] = {}
    for info in objects.list(keys.COMMITS):
        parsed = keys.parse_commit_key(info.name)
        if parsed is not None:
            unit, repair = parsed
            highest[unit] = max(repair, highest.get(unit, 0))
    return {unit: keys.commit_key(unit, repair) for unit, repair in sorted(highest.items())}


def begin_repair(objects: ObjectStore, unit: int, *, named: int | None = None) -> int:
    """Announce that `unit` is captured again and return the repair number to commit under.

    `named` is the number under which a snapshot knows the unit: where its commit was deleted, the
    next one must have another number, or the snapshot's row would be taken for it. While the
    announced repair has no commit, `store.gc` keeps every attempt at the unit. Raises
    `UnitNotFound` if the unit has no commit yet: then it needs no repair, only a capture.
    """
    repairs = [
        parsed[1]
        for info in objects.list(keys.commit_folder(unit))
        if (parsed := keys.parse_commit_key(info.name)) is not None and parsed[0] == unit
    ]
    if named is not None:
        repairs.append(named)
    if not repairs:
        raise UnitNotFound(
            f"unit {unit} has no commit to repair; run `attnstore run` to capture it"
        )
    repair = max(repairs) + 1
    _announce(objects, unit, repair)
    return repair


def _announce(objects: ObjectStore, unit: int, repair: int) -> None:
    objects.put(keys.repair_mark(unit, repair), [b""])
    objects.sync(keys.REPAIRED)


def read_commit(objects: ObjectStore, key: str) -> Commit:
    """Read the commit of this name and check that nothing in it contradicts itself.

    Raises `DamagedObject` if it is gone or damaged, `FormatError` if its rows, sizes or shards do
    not fit together: then nothing it says may be used.
    """
    commit = read_commit_leniently(objects, key)
    problems = commit_problems(commit)
    if problems:
        raise FormatError(
            f"{key} contradicts itself, {len(problems)} times: "
            + "; ".join(problems[:_LISTED_PROBLEMS])
            + "; run `attnstore verify`"
        )
    return commit


def read_commit_leniently(objects: ObjectStore, key: str) -> Commit:
    """Read a commit whose members may contradict each other: for totals and for verification."""
    parsed = keys.parse_commit_key(key)
    if parsed is None:
        raise ValueError(f"{key!r} is not the name of a commit")
    try:
        data = objects.get(key, max_bytes=MAX_JSON_BYTES)
    except ObjectNotFound as error:
        raise DamagedObject(f"{key} is missing; run `attnstore verify`") from error
    commit = Commit.from_bytes(data, key)
    if (commit.unit, commit.repair) != parsed:
        raise DamagedObject(
            f"{key} says it commits unit {commit.unit}, repair {commit.repair}; run `attnstore "
            "verify`"
        )
    return commit


def missing_objects(commit: Commit, listed: dict[str, int]) -> Iterator[str]:
    """Yield what a commit names and a listing (name -> bytes) lacks or contradicts."""
    for record in commit.objects:
        size = listed.get(record.name)
        if size is None:
            yield f"{record.name} is missing"
        elif size != record.bytes:
            yield f"{record.name} has {size} bytes where the commit says {record.bytes}"


def commit_problems(commit: Commit) -> list[str]:
    """Return what contradicts itself inside a commit: rows, shards, sizes. Reads nothing."""
    return [*_row_problems(commit), *_array_problems(commit)]


def _row_problems(commit: Commit) -> Iterator[str]:
    prompts = commit.prompts
    columns = (prompts.outcome, prompts.first_row, prompts.num_rows, prompts.first_position)
    if len({len(column) for column in columns}) != 1:
        yield f"prompt columns of lengths {[len(column) for column in columns]}"
        return
    row = 0
    for place, outcome in enumerate(prompts.outcome):
        if outcome is Outcome.STORED:
            if prompts.first_row[place] != row or prompts.num_rows[place] < 1:
                yield (
                    f"prompt {place} has {prompts.num_rows[place]} rows from "
                    f"{prompts.first_row[place]}, "
                    f"expected some from {row}"
                )
            row = prompts.first_row[place] + prompts.num_rows[place]
        elif prompts.num_rows[place]:
            yield f"prompt {place} is {outcome} and has {prompts.num_rows[place]} rows"
        elif str(place) not in prompts.reasons:
            yield f"prompt {place} is {outcome} without a reason"
    entries = sum(num_entries(rows) for rows in prompts.num_rows)
    for array in commit.arrays:
        expected = entries if array.is_packed else row
        if array.num_tokens != expected:
            kind = "entries" if array.is_packed else "rows"
            yield f"array {array.site} holds {array.num_tokens} {kind}, its prompts {expected}"


def _array_problems(commit: Commit) -> Iterator[str]:
    sizes = {record.name: record.bytes for record in commit.objects}
    if len(sizes) != len(commit.objects):
        yield "an object is named twice"
    sites = [array.site for array in commit.arrays]
    if len(set(sites)) != len(sites):
        yield f"a site is there twice: {sites}"
    shards: set[str] = set()
    for name in ["zarr.json", *map(keys.array_metadata_key, sites)] if sites else []:
        if name not in sizes:
            yield f"{name} is not among the commit's objects"
    for array in commit.arrays:
        try:
            geometry = array.geometry()
        except FormatError as error:
            yield str(error)
            continue
        if geometry.num_layers * geometry.num_token_shards * geometry.num_head_shards > len(sizes):
            yield f"array {array.site} has more shards than the commit has objects"
            continue
        for layer, token_shard, head_shard in geometry.shard_places():
            name = array.shard_name(layer, token_shard, head_shard)
            shards.add(name)
            problem = _shard_problem(array, geometry, name, token_shard, sizes.get(name))
            if problem:
                yield problem
        if array.codec is Codec.RAW and array.chunk_sizes:
            yield f"array {array.site} is raw and lists chunk sizes"
    for name in sizes:
        if "/c/" in name and name not in shards:
            yield f"{name} belongs to no array"


def _shard_problem(
    array: ArrayRecord, geometry: ArrayGeometry, name: str, token_shard: int, size: int | None
) -> str | None:
    if size is None:
        return f"{name} is not among the commit's objects"
    if array.codec is Codec.RAW:
        expected = geometry.raw_shard_bytes(token_shard)
    else:
        try:
            chunk_sizes = array.stored_sizes(geometry, token_shard, name)
        except FormatError as error:
            return str(error)
        largest = geometry.chunk_bytes + _BLOSC_OVERHEAD + CHECKSUM_BYTES
        if chunk_sizes.size and not (
            CHECKSUM_BYTES < chunk_sizes.min() <= chunk_sizes.max() <= largest
        ):
            return f"{name} has chunks of {chunk_sizes.min()} to {chunk_sizes.max()} bytes"
        expected = int(chunk_offsets(geometry, chunk_sizes)[-1]) + geometry.index_bytes
    return None if size == expected else f"{name} has {size} bytes where its chunks take {expected}"
