"""Whether what is stored is what the commits say. Lists every problem it finds; repairs nothing.

The default compares names, sizes and documents: one listing and one small read per commit. `deep`
also reads every byte of every object a commit names and checks each chunk's crc32c and tag, each
shard's index and each object's checksum. Damage never raises here; only a store that cannot be
reached does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np

from store import keys
from store.checksum import crc32c, hex_crc32c
from store.codec import DTYPES
from store.commit import committed_units, missing_objects, read_commit_leniently
from store.commit_problems import commit_problems
from store.committed_units import COLUMNS, CommittedUnits, UnitRow
from store.errors import DamagedObject, FormatError, ObjectNotFound, RunError, StoreError
from store.model_check import model_contradictions
from store.objects.protocol import ObjectStore
from store.parquet_file import read_parquet
from store.plan import read_segments
from store.planned_units import PlannedUnits
from store.run_format import (
    ArrayRecord,
    Commit,
    Document,
    ModelManifest,
    ObjectRecord,
    RunManifest,
    SnapshotManifest,
)
from store.sealed_json import MAX_JSON_BYTES
from store.shard import decode_chunk, stored_checksum
from store.shard_index import chunk_offsets, shard_checksum, shard_index
from store.snapshot import LATEST, read_snapshot, snapshot_names
from store.verify_beside import check_beside
from store.verify_report import VerifyReport
from store.zarr_metadata import metadata_problem

MAX_OBJECT_BYTES = 1 << 30
SHALLOW_THREADS = 16
DEEP_THREADS = 4
BATCH_UNITS = 1000
_T = TypeVar("_T", bound=Document)


def verify_run(
    objects: ObjectStore,
    *,
    deep: bool = False,
    threads: int | None = None,
    progress: Callable[[VerifyReport], None] | None = None,
) -> VerifyReport:
    """Check a whole run and return everything that is wrong with it.

    Works on `threads` units at a time (16), or with `deep` on as many objects of one unit (4), each
    held whole: 64 MiB as this library writes them. `progress` is called after each unit.
    """
    report = VerifyReport(deep=deep)
    run = _document(objects, keys.RUN, RunManifest, report)
    run_id = run.run_id if run is not None else None
    model = _document(objects, keys.MODEL, ModelManifest, report, optional=True)
    if model is not None and run_id is not None and model.run_id != run_id:
        report.add(keys.MODEL, f"belongs to run {model.run_id}, not {run_id}")
    planned = _check_plan(objects, run_id, report, deep=deep)
    workers = threads or (DEEP_THREADS if deep else SHALLOW_THREADS)
    committed = list(committed_units(objects).items())
    if model is None and committed and not any(p.name == keys.MODEL for p in report.problems):
        report.add(keys.MODEL, "is missing, though units are committed")
    with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        check = partial(_check_unit, objects, (run_id, model, planned), pool if deep else None)
        for start in range(0, len(committed), BATCH_UNITS):
            batch = committed[start : start + BATCH_UNITS]
            for found in (map if deep else pool.map)(check, batch):
                report.include(found)
                if progress is not None:
                    progress(report)
    _check_snapshots(objects, run_id, report, {unit for unit, _ in committed}, deep=deep)
    check_beside(objects, run_id, model, report, deep=deep)
    return report


def _document(
    objects: ObjectStore, name: str, kind: type[_T], report: VerifyReport, *, optional: bool = False
) -> _T | None:
    report.objects += 1
    try:
        return kind.from_bytes(objects.get(name, max_bytes=MAX_JSON_BYTES), name)
    except ObjectNotFound as error:
        report.objects -= 1
        if not optional:
            report.add(name, error)
    except (RunError, StoreError) as error:
        report.add(name, error)
    return None


def _check_unit(
    objects: ObjectStore,
    known: tuple[str | None, ModelManifest | None, PlannedUnits | None],
    pool: ThreadPoolExecutor | None,
    committed: tuple[int, str],
) -> VerifyReport:
    run_id, model, planned = known
    unit, key = committed
    report = VerifyReport(deep=pool is not None, units=1)
    try:
        commit = read_commit_leniently(objects, key)
        prefix = keys.attempt_prefix(commit.unit, commit.attempt)
    except (RunError, StoreError) as error:
        report.add(key, error, unit)
        return report
    if run_id is not None and commit.run_id != run_id:
        report.add(key, f"belongs to run {commit.run_id}, not {run_id}", unit)
    if planned is not None:
        for problem in planned.contradictions(commit):
            report.add(key, problem, unit)
    if model is not None:
        for problem in model_contradictions(commit, model):
            report.add(key, problem, unit)
    for problem in commit_problems(commit):
        report.add(key, problem, unit)
    listed = {info.name[len(prefix) :]: info.bytes for info in objects.list(prefix)}
    for problem in missing_objects(commit, listed):
        report.add(prefix, problem, unit)
    report.objects += len(commit.objects)
    report.bytes += sum(record.bytes for record in commit.objects)
    if pool is not None:
        sound = [record for record in commit.objects if listed.get(record.name) == record.bytes]
        shards = dict(_shards(commit))
        check = partial(_check_object, objects, commit, prefix, shards)
        checks = pool.map(check, sound)
        for record, message in zip(sound, checks, strict=True):
            if message is not None:
                report.add(prefix + record.name, message, unit)
    return report


def _shards(commit: Commit) -> Iterator[tuple[str, tuple[ArrayRecord, int]]]:
    for array in commit.arrays:
        try:
            geometry = array.geometry()
        except FormatError:
            continue
        if geometry.num_layers * geometry.num_token_shards * geometry.num_head_shards > len(
            commit.objects
        ):
            continue
        for layer, token_shard, head_shard in geometry.shard_places():
            yield array.shard_name(layer, token_shard, head_shard), (array, token_shard)


def _check_object(
    objects: ObjectStore,
    commit: Commit,
    prefix: str,
    shards: dict[str, tuple[ArrayRecord, int]],
    record: ObjectRecord,
) -> str | None:
    if record.bytes > MAX_OBJECT_BYTES:
        return f"states {record.bytes} bytes, more than the {MAX_OBJECT_BYTES} allowed"
    try:
        data = objects.get(prefix + record.name, max_bytes=record.bytes)
        if len(data) != record.bytes:
            return f"has {len(data)} bytes where the commit says {record.bytes}"
        if record.name in shards:
            checksum = _shard_bytes_checksum(*shards[record.name], data, prefix, record.name)
        else:
            checksum = crc32c(data)
    except (RunError, StoreError) as error:
        return str(error)
    if hex_crc32c(checksum) != record.crc32c:
        return (
            f"its bytes give the checksum {hex_crc32c(checksum)}, the commit says {record.crc32c}"
        )
    return metadata_problem(data, commit, record.name)


def _shard_bytes_checksum(
    array: ArrayRecord, token_shard: int, data: bytes, prefix: str, name: str
) -> int:
    """Check every chunk, every tag and the index of a shard's bytes and return its checksum."""
    geometry = array.geometry()
    sizes = array.stored_sizes(geometry, token_shard, name)
    offsets = chunk_offsets(geometry, sizes).tolist()
    index = shard_index(geometry, token_shard, sizes)
    if len(data) != offsets[-1] + len(index) or data[-len(index) :] != index:
        raise DamagedObject(f"{name}: its index is not the one its chunks give")
    view = memoryview(data)
    dtype = DTYPES[array.dtype]
    checksums = bytearray()
    for number, (start, end) in enumerate(pairwise(offsets)):
        decode_chunk(geometry, view[start:end], array.codec, dtype, prefix + name, number)
        checksums += stored_checksum(geometry, view[start:end])
    return shard_checksum(np.frombuffer(checksums, "<u4"), index)


def _check_plan(
    objects: ObjectStore, run_id: str | None, report: VerifyReport, *, deep: bool
) -> PlannedUnits | None:
    """Check the plan's files and return its units, or None if they cannot be read."""
    try:
        plans = read_segments(objects)
    except (RunError, ObjectNotFound) as error:
        report.add(keys.PLAN, error)
        return None
    tables, prompt_tokens = [], []
    for plan in plans:
        prefix = keys.plan_prefix(plan.segment)
        if run_id is not None and plan.run_id != run_id:
            report.add(prefix, f"belongs to run {plan.run_id}, not {run_id}")
        listed = {info.name[len(prefix) :]: info.bytes for info in objects.list(prefix)}
        for file in [*plan.prompts, *plan.units]:
            report.objects += 1
            report.bytes += file.bytes
            if listed.get(file.name) != file.bytes:
                found = listed.get(file.name)
                report.add(prefix + file.name, f"has {found} bytes, not {file.bytes}")
        for file in plan.units if not deep else [*plan.prompts, *plan.units]:
            try:
                table = read_parquet(objects, prefix, file)
            except (RunError, StoreError) as error:
                report.add(prefix + file.name, error)
                continue
            if file in plan.units:
                tables.append(table)
            else:
                prompt_tokens.append(np.asarray(table["num_tokens"].to_numpy(), np.int32))
    if sum(table.num_rows for table in tables) != sum(plan.num_units for plan in plans):
        return None
    return PlannedUnits.of(tables, prompt_tokens)


def _check_snapshots(
    objects: ObjectStore,
    run_id: str | None,
    report: VerifyReport,
    committed: set[int],
    *,
    deep: bool,
) -> None:
    """Check that snapshots are whole, that the newest one's units still have their commits, and
    with `deep` that its rows agree with them."""
    names = snapshot_names(objects)
    for name in names:
        prefix = f"{keys.SNAPSHOTS}{name}/"
        report.objects += 1
        try:
            snapshot = read_snapshot(objects, name, run_id)
            if name == names[-1]:
                _check_named(objects, snapshot, committed, report)
            if deep and name == names[-1]:
                for message in _contradictions(objects, snapshot):
                    report.add(prefix, message)
        except (RunError, StoreError) as error:
            report.add(prefix, error)
    _document(objects, LATEST, SnapshotManifest, report, optional=True)


def _check_named(
    objects: ObjectStore, snapshot: CommittedUnits, committed: set[int], report: VerifyReport
) -> None:
    """Find units whose commits were deleted after the snapshot; later ones are not listed yet."""
    for unit in sorted(set(snapshot.columns["unit"].tolist()) - committed):
        key = snapshot.key(unit) or ""
        try:
            objects.size(key)
        except ObjectNotFound:
            gone = f"is gone, though snapshot {snapshot.snapshot} names it"
            report.add(key, f"{gone}; `attnstore run CONFIG --repair` captures it again", unit)


def _contradictions(objects: ObjectStore, snapshot: CommittedUnits) -> Iterator[str]:
    columns = snapshot.columns
    for place, unit in enumerate(columns["unit"].tolist()):
        try:
            row = UnitRow.of(read_commit_leniently(objects, snapshot.key(unit) or ""))
        except RunError:
            continue
        stated = {name: int(columns[name][place]) for name in COLUMNS}
        if stated != {name: getattr(row, name) for name in COLUMNS}:
            yield f"its row of unit {unit} is not what the commit says"
        if tuple(snapshot.exceptions.get(unit, ())) != row.exceptions:
            yield f"its outcomes of unit {unit} are not what the commit says"
