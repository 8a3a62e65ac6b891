"""Why an object that a commit names is not there: lost, or removed after its unit was repaired.

`store.gc` removes the attempts that repairs replaced, and a run that was opened before still reads
them. Nothing is wrong with such a run, so whoever meets the gap is told which of the two it is.
"""

from __future__ import annotations

import re

from store import keys
from store.commit import read_commit_leniently
from store.errors import RunError, StoreError
from store.objects.protocol import ObjectStore

_IN_ATTEMPT = re.compile(rf"{keys.DATA}(\d{{8,}})/([^/]+)/.+")


def why_gone(objects: ObjectStore, name: str) -> str:
    """Return what to say of an object of an attempt that is committed and not there."""
    match = _IN_ATTEMPT.fullmatch(name)
    if match is not None:
        unit, attempt = int(match[1]), match[2]
        holder = _holder(objects, unit)
        if holder is not None and holder != attempt:
            return (
                f"{name} is gone: unit {unit} was captured again since it was looked at, and its "
                f"rows are now in attempt {holder}; call refresh() and read again"
            )
    return f"{name}: a commit lists it, but it is not there; run `attnstore verify`"


def newest_commit(objects: ObjectStore, unit: int) -> str | None:
    """Return the name of the commit that counts for a unit, or None; lists the unit's folder."""
    repairs = [
        parsed[1]
        for info in objects.list(keys.commit_folder(unit))
        if (parsed := keys.parse_commit_key(info.name)) is not None and parsed[0] == unit
    ]
    return keys.commit_key(unit, max(repairs)) if repairs else None


def _holder(objects: ObjectStore, unit: int) -> str | None:
    try:
        key = newest_commit(objects, unit)
        return None if key is None else read_commit_leniently(objects, key).attempt
    except (RunError, StoreError):
        return None
