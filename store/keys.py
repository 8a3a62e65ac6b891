"""The names of every object of a run, relative to the run's URL, built and checked in one place.

Nothing that a user or a prompt supplies is ever part of a name. Names read back from metadata pass
`checked_name` before they reach a store, so a hostile run cannot point outside itself.
"""

from __future__ import annotations

import re

from store.errors import UnsafeName

RUN = "run.json"
MODEL = "model.json"
PLAN = "plan/"
DATA = "data/"
COMMITS = "commits/"
REPAIRED = "commits/repaired/"
SNAPSHOTS = "snapshots/"
CHECKS = "checks/"
OWNERS = "owners/"
GROUP_METADATA = "zarr.json"
"""The name of the group's metadata inside its attempt."""

BEFORE_PLAN = "p"
"""Sorts before `plan/` and `snapshots/` and after all folders that grow with a run: one listing of
what comes after it tells both."""

UNITS_PER_FOLDER = 1000

# Letters, digits, `_`, `-` and single dots, the first no `-` and no dot; so never `.` or `..`.
SEGMENT_PATTERN = r"[A-Za-z0-9_](?:\.?[A-Za-z0-9_\-])*\.?"
NAME_PATTERN = rf"{SEGMENT_PATTERN}(?:/{SEGMENT_PATTERN})*"
MAX_NAME = 512
_SEGMENT = re.compile(SEGMENT_PATTERN)
_NAME = re.compile(NAME_PATTERN)
_COMMIT_NAME = re.compile(r"commits/(\d{6,})/(\d{8,})(?:\.r(\d+))?\.json")
_REPAIR_MARK = re.compile(r"commits/repaired/(\d{8,})\.r(\d+)")


def unit_name(unit: int) -> str:
    """Return the eight-digit name of unit number `unit` (a run-wide ordinal from 0)."""
    if unit < 0:
        raise ValueError(f"a unit number is never negative, got {unit}")
    return f"{unit:08d}"


def commit_folder(unit: int) -> str:
    """Return the folder of the commits of `unit` and its 999 neighbours, ending in a slash."""
    return f"{COMMITS}{unit // UNITS_PER_FOLDER:06d}/"


def commit_key(unit: int, repair: int = 0) -> str:
    """Return the name of the unit's commit; `repair` > 0 names its repair of that number."""
    suffix = f".r{repair}" if repair else ""
    return f"{commit_folder(unit)}{unit_name(unit)}{suffix}.json"


def parse_commit_key(key: str) -> tuple[int, int] | None:
    """Return (unit, repair) for a commit's name, or None if `key` is not one."""
    match = _COMMIT_NAME.fullmatch(key)
    if match is None:
        return None
    unit, repair = int(match[2]), int(match[3] or 0)
    return (unit, repair) if key == commit_key(unit, repair) else None


def repair_mark(unit: int, repair: int) -> str:
    """Return the name of the empty object that announces a repair's commit."""
    return f"{REPAIRED}{unit_name(unit)}.r{repair}"


def parse_repair_mark(key: str) -> tuple[int, int] | None:
    """Return (unit, repair) for the name of a repair's announcement, or None if it is not one."""
    match = _REPAIR_MARK.fullmatch(key)
    if match is None:
        return None
    unit, repair = int(match[1]), int(match[2])
    return (unit, repair) if key == repair_mark(unit, repair) else None


def attempt_prefix(unit: int, attempt: str) -> str:
    """Return the folder that holds the data of one attempt at `unit`, ending in a slash."""
    return f"{DATA}{unit_name(unit)}/{checked_segment(attempt)}/"


def shard_key(site: str, coordinates: tuple[int, ...]) -> str:
    """Return a shard's name inside its attempt: Zarr v3's default chunk key encoding."""
    return f"{checked_segment(site)}/c/" + "/".join(str(c) for c in coordinates)


def array_metadata_key(site: str) -> str:
    """Return the name of the site's array metadata inside its attempt."""
    return f"{checked_segment(site)}/zarr.json"


def plan_prefix(segment: int) -> str:
    """Return the folder of plan segment number `segment`, ending in a slash."""
    return f"{PLAN}{segment:04d}/"


def checked_segment(segment: str) -> str:
    """Return `segment` if it is one safe path segment, else raise `UnsafeName`."""
    if not _SEGMENT.fullmatch(segment):
        raise UnsafeName(
            f"{segment!r} is not a safe object name; the run's metadata is not to be trusted"
        )
    return segment


def checked_name(name: str) -> str:
    """Return `name` if it is a relative path of safe segments, else raise `UnsafeName`."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise UnsafeName(
            f"{name[:MAX_NAME]!r} is not a safe object name; the run's metadata is not to be "
            "trusted"
        )
    return name
