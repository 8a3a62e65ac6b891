"""Whether what is stored is what the commits say. Lists every problem it finds; repairs nothing.

The default compares names, sizes and documents: one listing and one small read per commit. `deep`
also reads every byte of every object a commit names and checks each chunk's crc32c and tag, each
shard's index and each object's checksum. Damage never raises here; only a store that cannot be
reached does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

from store import keys
from store.commit import committed_units, missing_objects, read_commit_leniently
from store.commit_problems import commit_problems
from store.committed_units import COLUMNS, CommittedUnits, UnitRow
from store.due_sites import due_sites, site_contradictions
from store.errors import FormatError, ObjectNotFound, RunError, StoreError
from store.generated import GENERATED, read_generated
from store.model_check import model_contradictions
from store.objects.local import LocalStore
from store.objects.protocol import ObjectStore
from store.plan import FIRST_MANIFEST, missing_segment
from store.planned_units import PlannedUnits
from store.replaced import newest_commit
from store.run_format import (
    Commit,
    Document,
    ModelManifest,
    Outcome,
    RunManifest,
    SnapshotManifest,
)
from store.sealed_json import MAX_JSON_BYTES
from store.snapshot import LATEST, MANIFEST, read_snapshot, snapshot_names
from store.summaries import SUMMARIES
from store.verify_beside import check_beside
from store.verify_object import object_problem, shards_of
from store.verify_plan import check_plan
from store.verify_report import VerifyReport
from store.weights import WEIGHTS

SHALLOW_THREADS = 16
DEEP_THREADS = 4
BATCH_UNITS = 1000
_FOLDERS = {
    prefix.rstrip("/")
    for prefix in (
        keys.CHECKS, keys.COMMITS, keys.DATA, keys.OWNERS, keys.PLAN, keys.SNAPSHOTS, SUMMARIES,
        WEIGHTS,
    )
}  # fmt: skip
"""A run in which one of these is a link is looked at no further: nothing in it can be listed."""
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
    if isinstance(objects, LocalStore):
        for name in objects.no_files():
            report.add(name, "is a link, a pipe or a device: what lies behind it is not the run's")
        if {one.name for one in report.problems} & _FOLDERS:
            return report
    run = _document(objects, keys.RUN, RunManifest, report)
    run_id = run.run_id if run is not None else None
    model = _document(objects, keys.MODEL, ModelManifest, report, optional=True)
    if model is not None and run_id is not None and model.run_id != run_id:
        report.add(keys.MODEL, f"belongs to run {model.run_id}, not {run_id}")
    # Before the plan: a segment is there before any of its units is committed.
    committed = list(committed_units(objects).items())
    planned = check_plan(objects, run, report, deep=deep)
    workers = threads or (DEEP_THREADS if deep else SHALLOW_THREADS)
    if planned is not None and planned.segments and committed:
        planned = _with_lost_segment(planned, committed[-1][0], report)
    if planned is not None and not planned.segments and committed:
        report.add(FIRST_MANIFEST, "is missing, though units are committed; restore it from a copy")
        planned = None
    if model is None and committed and not any(p.name == keys.MODEL for p in report.problems):
        report.add(keys.MODEL, "is missing, though units are committed")
    with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        due = frozenset[str]() if run is None else due_sites(run.config)
        known = run_id, model, planned, due
        check = partial(_check_unit, objects, known, pool if deep else None)
        for start in range(0, len(committed), BATCH_UNITS):
            batch = committed[start : start + BATCH_UNITS]
            for found in (map if deep else pool.map)(check, batch):
                report.include(found)
                if progress is not None:
                    progress(report)
    _check_alike(report, dict(committed))
    _check_snapshots(objects, run_id, report, dict(committed), deep=deep)
    check_beside(objects, run, model, report, deep=deep)
    return report


def _with_lost_segment(planned: PlannedUnits, last: int, report: VerifyReport) -> PlannedUnits:
    """Name the segment that is missing if unit `last` is beyond the plan, once for all of them."""
    end = sum(segment.num_units for segment in planned.segments)
    if last < end:
        return planned
    name, message = missing_segment(planned.segments, f"unit {last} is committed").split(" ", 1)
    report.add(name, f"{message}; restore it from a copy")
    return replace(planned, unread=[*planned.unread, range(end, last + 1)])


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
    known: tuple[str | None, ModelManifest | None, PlannedUnits | None, frozenset[str]],
    pool: ThreadPoolExecutor | None,
    committed: tuple[int, str],
) -> VerifyReport:
    """Check a unit's commit, and the one that took its place if a repair did in the meantime."""
    unit, key = committed
    while True:
        report = _check_commit(objects, known, pool, unit, key)
        # gc may have removed what a commit names once another counts for the unit.
        newest = newest_commit(objects, unit) if report.problems else None
        if newest is None or newest == key:
            return report
        key = newest


def _check_commit(
    objects: ObjectStore,
    known: tuple[str | None, ModelManifest | None, PlannedUnits | None, frozenset[str]],
    pool: ThreadPoolExecutor | None,
    unit: int,
    key: str,
) -> VerifyReport:
    run_id, model, planned, due = known
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
        generated = _generated(objects, commit, report) if pool is not None else None
        for problem in planned.contradictions(commit, generated):
            report.add(key, problem, unit)
    if model is not None:
        for problem in model_contradictions(commit, model):
            report.add(key, problem, unit)
    for problem in chain(site_contradictions(commit, due), commit_problems(commit)):
        report.add(key, problem, unit)
    if Outcome.STORED in commit.prompts.outcome:
        report.held[tuple(sorted(array.site for array in commit.arrays))] = [unit]
    try:
        found = objects.list(prefix) if commit.objects else ()
        listed = {info.name[len(prefix) :]: info.bytes for info in found}
    except RunError as error:  # A link leads to it.
        report.add(prefix, error, unit)
        return report
    for problem in missing_objects(commit, listed):
        report.add(prefix, problem, unit)
    report.objects += len(commit.objects)
    report.bytes += sum(record.bytes for record in commit.objects)
    if pool is not None:
        sound = [record for record in commit.objects if listed.get(record.name) == record.bytes]
        shards = dict(shards_of(commit))
        check = partial(object_problem, objects, commit, prefix, shards)
        checks = pool.map(check, sound)
        for record, message in zip(sound, checks, strict=True):
            if message is not None:
                report.add(prefix + record.name, message, unit)
    return report


def _check_alike(report: VerifyReport, committed: dict[int, str]) -> None:
    """Report units that lack a site which most units hold: no config tells those of a probe."""
    if len(report.held) < 2:
        return
    usual = set(max(report.held.items(), key=lambda one: len(one[1]))[0])
    known = {(problem.name, problem.message.split(",")[0]) for problem in report.problems}
    for sites, units in report.held.items():
        for site in sorted(usual.difference(sites)):
            for unit in units:
                if (committed[unit], f"holds no {site}") not in known:
                    report.add(committed[unit], f"holds no {site}, which most units hold", unit)


def _generated(objects: ObjectStore, commit: Commit, report: VerifyReport) -> dict[int, int] | None:
    """Return how many tokens were generated after each prompt, None where that is unreadable."""
    try:
        return {place: len(one.token_ids) for place, one in read_generated(objects, commit).items()}
    except FormatError as error:
        name = keys.attempt_prefix(commit.unit, commit.attempt) + GENERATED
        report.add(name, error, commit.unit)
    except (RunError, StoreError):
        # Missing or altered bytes: the check of every object reports them.
        pass
    return None


def _check_snapshots(
    objects: ObjectStore,
    run_id: str | None,
    report: VerifyReport,
    committed: dict[int, str],
    *,
    deep: bool,
) -> None:
    """Check that snapshots are whole and that the newest one says what the commits say."""
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
            # gc may have removed it, which it does from its manifest on.
            if name in snapshot_names(objects):
                report.add(prefix, error)
    latest = _document(objects, LATEST, SnapshotManifest, report, optional=True)
    if latest is not None and run_id is not None and latest.run_id != run_id:
        report.add(LATEST, f"belongs to run {latest.run_id}, not {run_id}")
    elif latest is not None:
        # Another may have been written since the listing: so it is looked for by its name.
        try:
            objects.size(f"{keys.SNAPSHOTS}{latest.name}/{MANIFEST}")
        except ObjectNotFound:
            report.add(LATEST, f"names the snapshot {latest.name}, which is not there")


def _check_named(
    objects: ObjectStore, snapshot: CommittedUnits, committed: dict[int, str], report: VerifyReport
) -> None:
    """Find units whose commits were deleted after the snapshot; later ones are not listed yet."""
    for unit in snapshot.columns["unit"].tolist():
        key, held = snapshot.key(unit) or "", keys.parse_commit_key(committed.get(unit, ""))
        if held is not None and held[1] >= snapshot.repair(unit):
            continue
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
