"""Commits: the create-only documents that make attempts part of a run.

A unit has one commit per repair number and the highest counts. Of two attempts at one unit exactly
one commits; the other learns that it was superseded. A client that retries a commit whose answer
was lost meets its own commit, and is told that it won.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from store import keys
from store.commit_problems import commit_problems
from store.errors import (
    CommitRefused,
    DamagedObject,
    FormatError,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    UnitNotFound,
)
from store.objects.protocol import ObjectStore
from store.run_format import Commit
from store.sealed_json import MAX_JSON_BYTES

_LISTED_PROBLEMS = 5


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
    if commit.objects and not problems:
        listed = {info.name[len(prefix) :]: info.bytes for info in objects.list(prefix)}
        problems = list(missing_objects(commit, listed))
    if problems:
        raise CommitRefused(
            f"attempt {commit.attempt} at unit {commit.unit} is not complete, {len(problems)} "
            "problems: " + "; ".join(problems[:_LISTED_PROBLEMS]) + ". Capture the unit again."
        )
    if commit.objects:
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


def require_run(commit: Commit, key: str, run_id: str) -> None:
    """Raise `FormatError` if the commit of this name belongs to another run."""
    if commit.run_id != run_id:
        raise FormatError(
            f"{key} belongs to run {commit.run_id}, not {run_id}; run `attnstore verify`"
        )


def missing_objects(commit: Commit, listed: dict[str, int]) -> Iterator[str]:
    """Yield what a commit names and a listing (name -> bytes) lacks or contradicts."""
    for record in commit.objects:
        size = listed.get(record.name)
        if size is None:
            yield f"{record.name} is missing"
        elif size != record.bytes:
            yield f"{record.name} has {size} bytes where the commit says {record.bytes}"
