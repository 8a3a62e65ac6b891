"""What may be removed: attempts and plans that lost, old snapshots, what killed processes left.

An attempt is garbage only if its unit has a commit, that commit names another attempt, and no
repair of the unit is announced and still open. So an attempt that is merely slow can never commit
what was deleted: the name its commit would take is taken already.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from store import keys
from store.commit import committed_units, read_commit
from store.errors import ObjectNotFound, RunError
from store.objects.local import LocalStore
from store.objects.protocol import ObjectInfo, ObjectStore
from store.plan import MANIFEST as PLAN_MANIFEST
from store.plan import read_manifest
from store.snapshot import MANIFEST, latest_snapshot, snapshot_names

KEPT_SNAPSHOTS = 2
STALE_SECONDS = 24 * 3600.0
_PLAN_NAME = re.compile(r"plan/(\d{4,})/[^/]+")
_DATA_NAME = re.compile(r"data/(\d{8,})/([^/]+)/(.+)")


@dataclass(frozen=True, slots=True)
class Garbage:
    """A folder whose objects nothing refers to, or the object of that name; data have a `unit`."""

    prefix: str
    objects: int
    bytes: int
    unit: int | None = None

    def names(self, objects: ObjectStore) -> list[str]:
        """Return the names of its objects; a manifest, which makes a snapshot one, comes first."""
        if not self.prefix.endswith("/"):
            return [self.prefix]
        names = [info.name for info in objects.list(self.prefix)]
        return sorted(names, key=lambda name: not name.endswith(f"/{MANIFEST}"))


@dataclass(slots=True)
class GcReport:
    """What was found, and whether it was deleted."""

    deleted: bool
    garbage: list[Garbage] = field(default_factory=list)
    temporary_files: int = 0

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.garbage)


def collect_garbage(objects: ObjectStore, *, delete: bool = False, threads: int = 8) -> GcReport:
    """Find what nothing refers to any more and, with `delete`, remove it.

    Safe beside running captures and readers of committed data. Costs a listing of all data. Raises
    `DamagedObject` if a commit that would decide cannot be read or a link stands in the way: then
    nothing was deleted.
    """
    report = GcReport(deleted=delete)
    if isinstance(objects, LocalStore):
        # Counted first, since what cannot be counted is refused.
        report.temporary_files = objects.stale_temporaries(time.time() - STALE_SECONDS)
    report.garbage += _lost_attempts(objects)
    report.garbage += _old_snapshots(objects)
    report.garbage += _unnamed_plan_files(objects)
    if delete:
        with ThreadPoolExecutor(threads, thread_name_prefix="gc") as pool:
            for one in report.garbage:
                names = one.names(objects)
                for name in names[:1]:
                    objects.delete(name)
                list(pool.map(objects.delete, names[1:]))
        if isinstance(objects, LocalStore):
            report.temporary_files = objects.stale_temporaries(
                time.time() - STALE_SECONDS, delete=True
            )
    return report


def _lost_attempts(objects: ObjectStore) -> Iterator[Garbage]:
    # Data first, then announcements, then commits. A repair is announced before it writes, so an
    # attempt seen here that may still commit is seen to be announced; and what has committed by the
    # time its announcement is read is seen to have committed.
    candidates = [(unit, attempts) for unit, attempts in _attempts(objects) if len(attempts) > 1]
    announced = [keys.parse_repair_mark(info.name) for info in objects.list(keys.REPAIRED)]
    committed = committed_units(objects)
    open_repairs = {
        unit for unit, repair in filter(None, announced) if _repair_of(committed, unit) < repair
    }
    for unit, attempts in candidates:
        if unit not in committed or unit in open_repairs:
            continue
        kept = read_commit(objects, committed[unit]).attempt
        for attempt, (count, size) in sorted(attempts.items()):
            if attempt != kept:
                yield Garbage(keys.attempt_prefix(unit, attempt), count, size, unit)


def _repair_of(committed: dict[int, str], unit: int) -> int:
    parsed = keys.parse_commit_key(committed.get(unit, ""))
    return parsed[1] if parsed is not None else -1


def _attempts(objects: ObjectStore) -> Iterator[tuple[int, dict[str, tuple[int, int]]]]:
    """Yield each unit's attempts -> (objects, bytes); a listing keeps a unit's objects together."""
    unit: int | None = None
    attempts: dict[str, tuple[int, int]] = {}
    for info in objects.list(keys.DATA):
        match = _DATA_NAME.fullmatch(info.name)
        if match is None:
            continue
        if int(match[1]) != unit:
            if unit is not None:
                yield unit, attempts
            unit, attempts = int(match[1]), {}
        count, size = attempts.get(match[2], (0, 0))
        attempts[match[2]] = (count + 1, size + info.bytes)
    if unit is not None:
        yield unit, attempts


def _named_by_latest(objects: ObjectStore) -> str | None:
    """Return the snapshot that readers of a web-served run open; it need not be the newest."""
    try:
        return latest_snapshot(objects).name
    except (RunError, ObjectNotFound):
        return None


def _old_snapshots(objects: ObjectStore) -> Iterator[Garbage]:
    names = snapshot_names(objects)
    named = _named_by_latest(objects)
    for name in names[:-KEPT_SNAPSHOTS]:
        if name == named:
            continue
        prefix = f"{keys.SNAPSHOTS}{name}/"
        found = list(objects.list(prefix))
        yield Garbage(prefix, len(found), sum(info.bytes for info in found))


def _unnamed_plan_files(objects: ObjectStore) -> Iterator[Garbage]:
    """Yield files of segments that have a manifest which does not name them.

    A segment without one may be in the middle of being planned: its files are left alone.
    """
    found: dict[int, list[ObjectInfo]] = {}
    for info in objects.list(keys.PLAN):
        if match := _PLAN_NAME.fullmatch(info.name):
            found.setdefault(int(match[1]), []).append(info)
    for segment, files in sorted(found.items()):
        prefix = keys.plan_prefix(segment)
        if not any(info.name == prefix + PLAN_MANIFEST for info in files):
            continue
        manifest = read_manifest(objects, segment)
        named = {prefix + file.name for file in (*manifest.prompts, *manifest.units)}
        for info in sorted(files, key=lambda info: info.name):
            if info.name not in named and info.name != prefix + PLAN_MANIFEST:
                yield Garbage(info.name, 1, info.bytes)
