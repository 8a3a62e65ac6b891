"""One row a unit, consolidated from commits, so that opening a run does not cost one read per
commit.

A snapshot is derived: the driver writes it now and then, anyone may write it anew, and a damaged
one is passed over. It holds a row for every unit committed when it was written and states how many
*leading commit folders* are complete. Whoever opens a run lists the commits after those folders
only; a repair inside a complete folder is found by its announcement (`commits/repaired/`), which is
put before it.

It never knows arrays: reading rows of a unit still takes the unit's own commit.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store import keys
from store.ahead import Begin, Begun, first_page
from store.committed_units import COLUMNS, CommittedUnits, Mapper, PromptException
from store.errors import CannotList, FormatError, ObjectNotFound, RunError
from store.objects.protocol import ObjectStore
from store.parquet_file import read_parquet, write_parquet
from store.run_format import Outcome, SnapshotManifest
from store.sealed_json import MAX_JSON_BYTES

MANIFEST = "manifest.json"
UNITS_FILE = "units.parquet"
EXCEPTIONS_FILE = "exceptions.parquet"
_SEQUENCE_DIGITS = 8
LATEST = f"{keys.SNAPSHOTS}latest.json"

_FIRST = f"{keys.COMMITS}0"
"""Sorts before every commit. A listing after it is never one that was begun before."""


def find_committed(objects: ObjectStore, run_id: str, begin: Begin = Begun) -> CommittedUnits:
    """Return which units are committed, from the newest sound snapshot and one listing after it.

    A snapshot of another run than `run_id` is passed over like a damaged one.

    Costs the snapshot plus the commits in folders that it does not call complete. Where nothing can
    be listed, only what the latest snapshot names is found. Raises `CannotList` if there is none.
    """
    try:
        names = snapshot_names(objects)
    except CannotList:
        return _latest(objects, run_id)
    # A commit missing from a listing is gone only if the listing is younger than the snapshot: this
    # one begins here, where the names of all snapshots are known.
    younger = begin(partial(first_page, objects, keys.COMMITS, _FIRST)) if names else None
    found = _newest(objects, run_id, names, begin)
    floor = found.complete_folders
    if floor:
        # The digit after a folder's name sorts behind everything inside the folder.
        listing = objects.list(keys.COMMITS, after=f"{keys.COMMITS}{floor - 1:06d}0")
    else:
        listing = objects.list(keys.COMMITS) if younger is None else younger.result()
    listed: dict[int, int] = {}
    stamps: dict[tuple[int, int], str] = {}
    for info in listing:
        parsed = keys.parse_commit_key(info.name)
        if parsed is not None:
            listed[parsed[0]] = max(parsed[1], listed.get(parsed[0], 0))
            stamps[parsed] = f"{info.bytes} {info.stamp}"
            continue
        mark = keys.parse_repair_mark(info.name)
        if mark is not None and _repair_exists(objects, found, *mark):
            listed[mark[0]] = max(mark[1], listed.get(mark[0], 0))
    found.forget(found.columns["unit"][_without_commit(found, listed)])
    for unit, repair in listed.items():
        if repair < found.lost.get(unit, 0):
            continue  # What a repair replaced must not come back because the repair is gone.
        place = found.place(unit)
        if place is None or found.columns["repair"][place] != repair:
            found.newer[unit] = repair
            found.stamps[unit] = stamps.get((unit, repair), "")
    return found


def _without_commit(found: CommittedUnits, listed: dict[int, int]) -> NDArray[np.bool_]:
    """Which of the snapshot's rows, in folders that were listed, have lost their commit since."""
    units, repairs = found.columns["unit"], found.columns["repair"]
    in_listed_folders = units >= found.complete_folders * keys.UNITS_PER_FOLDER
    held = np.asarray([listed.get(unit, -1) for unit in units[in_listed_folders].tolist()])
    lost = np.zeros(len(units), bool)
    lost[in_listed_folders] = held < repairs[in_listed_folders]
    return lost


def write_snapshot(
    objects: ObjectStore, run_id: str, map_: Mapper[Any, Any] = map
) -> SnapshotManifest:
    """Consolidate all commits into a new snapshot, made visible by its manifest, and return that.

    Safe with other writers of snapshots and of commits. Reads the commits since the last one.
    """
    committed = find_committed(objects, run_id)
    committed.load(objects, run_id, map_)
    table = committed.table()
    name = f"{_next_sequence(objects):0{_SEQUENCE_DIGITS}d}-{secrets.token_hex(4)}"
    prefix = f"{keys.SNAPSHOTS}{name}/"
    exceptions = committed.all_exceptions()
    units_of = np.searchsorted(table["first_prompt"], [e.prompt for e in exceptions], "right") - 1
    files = [
        write_parquet(objects, prefix, UNITS_FILE, pa.table(table)),
        write_parquet(
            objects,
            prefix,
            EXCEPTIONS_FILE,
            pa.table(
                {
                    "unit": pa.array(table["unit"][units_of] if exceptions else [], pa.int64()),
                    "prompt": pa.array([one.prompt for one in exceptions], pa.int64()),
                    "outcome": pa.array([one.outcome.value for one in exceptions], pa.string()),
                    "reason": pa.array([one.reason for one in exceptions], pa.string()),
                }
            ),
        ),
    ]
    manifest = SnapshotManifest(
        run_id=run_id,
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        units=len(table["unit"]),
        complete_folders=complete_folders(table["unit"]),
        files=files,
    )
    objects.sync(prefix)
    objects.create(prefix + MANIFEST, manifest.to_bytes())
    _point_to(objects, manifest)
    return manifest


def _point_to(objects: ObjectStore, manifest: SnapshotManifest) -> None:
    """Let `LATEST` name this snapshot, or a newer one that is there.

    A writer that was slow may have put its name over a newer one, which then is in the listing that
    follows the put. Only one that dies in between leaves the older name, until the next snapshot.
    """
    newest: SnapshotManifest | None = manifest
    while newest is not None and not _is_named(objects, newest):
        objects.put(LATEST, [newest.to_bytes()])
        newest = _newer(objects, newest)


def _is_named(objects: ObjectStore, manifest: SnapshotManifest) -> bool:
    """Whether `LATEST` names this snapshot of the run, or a newer one."""
    try:
        held = latest_snapshot(objects)
    except (RunError, ObjectNotFound):
        return False
    return held.run_id == manifest.run_id and _age(held) >= _age(manifest)


def _newer(objects: ObjectStore, manifest: SnapshotManifest) -> SnapshotManifest | None:
    """Return the newest sound manifest of the run's snapshots, if it is newer than this one."""
    found = [manifest]
    for name in snapshot_names(objects):
        if name[:_SEQUENCE_DIGITS] < manifest.name[:_SEQUENCE_DIGITS]:
            continue
        try:
            found.append(_read_manifest(objects, name))
        except (RunError, ObjectNotFound):
            continue
    newest = max((one for one in found if one.run_id == manifest.run_id), key=_age)
    return None if newest.name == manifest.name else newest


def _age(manifest: SnapshotManifest) -> tuple[str, int, str]:
    """Order snapshots from old to new: two writers at a time take the same number."""
    return manifest.name[:_SEQUENCE_DIGITS], manifest.units, manifest.name


def latest_snapshot(objects: ObjectStore) -> SnapshotManifest:
    """Return what `LATEST` holds. Raises `ObjectNotFound` if it is not there."""
    return SnapshotManifest.from_bytes(objects.get(LATEST, max_bytes=MAX_JSON_BYTES), LATEST)


def _read_manifest(objects: ObjectStore, name: str) -> SnapshotManifest:
    """Return the manifest of the snapshot of this name. Raises `FormatError` if it is another's."""
    key = f"{keys.SNAPSHOTS}{keys.checked_segment(name)}/{MANIFEST}"
    manifest = SnapshotManifest.from_bytes(objects.get(key, max_bytes=MAX_JSON_BYTES), key)
    if manifest.name != name:
        raise FormatError(f"{key} does not describe the snapshot it is in")
    return manifest


def complete_folders(units: NDArray[np.int64]) -> int:
    """Return how many leading commit folders have all their units among `units` (ascending)."""
    per_folder = np.bincount(units // keys.UNITS_PER_FOLDER) if len(units) else np.zeros(0)
    incomplete = np.flatnonzero(per_folder < keys.UNITS_PER_FOLDER)
    return int(incomplete[0]) if len(incomplete) else len(per_folder)


def snapshot_names(objects: ObjectStore) -> list[str]:
    """Return the names of all finished snapshots, oldest first."""
    ending = f"/{MANIFEST}"
    return sorted(
        info.name[len(keys.SNAPSHOTS) : -len(ending)]
        for info in objects.list(keys.SNAPSHOTS)
        if info.name.endswith(ending) and info.name.count("/") == 2
    )


def read_snapshot(
    objects: ObjectStore, name: str, run_id: str | None, begin: Begin = Begun
) -> CommittedUnits:
    """Return one snapshot's rows. Raises `DamagedObject` or `FormatError`.

    Also where it belongs to another run than `run_id`; None where nothing tells which run it is.
    """
    prefix = f"{keys.SNAPSHOTS}{keys.checked_segment(name)}/"
    manifest = _read_manifest(objects, name)
    begun = {
        file.name: begin(partial(read_parquet, objects, prefix, file)) for file in manifest.files
    }
    tables = {file: one.result() for file, one in begun.items()}
    if run_id is not None and manifest.run_id != run_id:
        raise FormatError(f"{prefix}{MANIFEST} belongs to run {manifest.run_id}, not {run_id}")
    if set(tables) != {UNITS_FILE, EXCEPTIONS_FILE}:
        raise FormatError(f"{prefix}{MANIFEST} does not describe the snapshot it is in")
    columns = _columns(tables[UNITS_FILE], prefix)
    exceptions = _exceptions(tables[EXCEPTIONS_FILE], prefix)
    if len(columns["unit"]) != manifest.units or (np.diff(columns["unit"]) <= 0).any():
        raise FormatError(f"{prefix}{UNITS_FILE}: its units are not the manifest's, ascending")
    if (problem := _misplaced(columns, exceptions)) is not None:
        raise FormatError(f"{prefix}{EXCEPTIONS_FILE}: {problem}")
    if complete_folders(columns["unit"]) < manifest.complete_folders:
        raise FormatError(f"{prefix}{MANIFEST} calls folders complete that are not")
    return CommittedUnits(
        columns=columns,
        exceptions=exceptions,
        newer={},
        complete_folders=manifest.complete_folders,
        snapshot=name,
    )


def _newest(objects: ObjectStore, run_id: str, names: list[str], begin: Begin) -> CommittedUnits:
    damage: list[str] = []
    for name in reversed(names):
        try:
            found = read_snapshot(objects, name, run_id, begin)
        except (RunError, ObjectNotFound) as error:
            damage.append(str(error))
            continue
        found.damage = damage
        return found
    return CommittedUnits.none(damage)


def _latest(objects: ObjectStore, run_id: str) -> CommittedUnits:
    try:
        latest = latest_snapshot(objects)
    except ObjectNotFound:
        raise CannotList(
            f"{objects.url} cannot list commits and has no snapshot; open the run where it is "
            "stored"
        ) from None
    return read_snapshot(objects, latest.name, run_id)


def _repair_exists(objects: ObjectStore, found: CommittedUnits, unit: int, repair: int) -> bool:
    place = found.place(unit)
    if place is not None and found.columns["repair"][place] >= repair:
        return False
    try:
        objects.size(keys.commit_key(unit, repair))
    except ObjectNotFound:
        return False
    return True


def _next_sequence(objects: ObjectStore) -> int:
    numbers = [
        int(name[:_SEQUENCE_DIGITS])
        for name in snapshot_names(objects)
        if re.fullmatch(rf"[0-9]{{{_SEQUENCE_DIGITS}}}-.*", name)
    ]
    return max(numbers, default=-1) + 1


def _columns(table: pa.Table, prefix: str) -> dict[str, NDArray[np.int64]]:
    if table.column_names != list(COLUMNS) or any(t != pa.int64() for t in table.schema.types):
        raise FormatError(f"{prefix}{UNITS_FILE} has other columns than {COLUMNS}")
    if any(column.null_count for column in table.columns):
        raise FormatError(f"{prefix}{UNITS_FILE} has empty cells")
    columns = {name: np.asarray(table[name].to_numpy(), np.int64) for name in COLUMNS}
    if any((column < 0).any() for column in columns.values()):
        raise FormatError(f"{prefix}{UNITS_FILE} has negative numbers")
    return columns


def _misplaced(
    columns: dict[str, NDArray[np.int64]], exceptions: dict[int, list[PromptException]]
) -> str | None:
    """Return which prompt is called one of a unit whose row says otherwise, or None."""
    for unit, found in exceptions.items():
        at = int(np.searchsorted(columns["unit"], unit))
        if at == len(columns["unit"]) or columns["unit"][at] != unit:
            return f"unit {unit} has no row"
        first = int(columns["first_prompt"][at])
        prompts = range(first, first + int(columns["num_prompts"][at]))
        for one in found:
            if one.prompt not in prompts:
                return f"prompt {one.prompt} is none of unit {unit}"
    return None


def _exceptions(table: pa.Table, prefix: str) -> dict[int, list[PromptException]]:
    found: dict[int, list[PromptException]] = {}
    try:
        for row in table.to_pylist():
            one = PromptException(int(row["prompt"]), Outcome(row["outcome"]), str(row["reason"]))
            found.setdefault(int(row["unit"]), []).append(one)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{prefix}{EXCEPTIONS_FILE}: {error}") from error
    return found
