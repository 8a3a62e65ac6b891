"""What is left of units that no plan has, or of a run that has no `run.json` (yet, or any more).

Rows are of the prompts of the plan that they were captured from. Before units are planned anew,
this looks for what was captured under their numbers. Knows names only; reads no object.
"""

from __future__ import annotations

import re

from store import keys
from store.errors import CannotList, ObjectNotFound, RunNotFound
from store.objects.protocol import ObjectStore
from store.plan import FIRST_MANIFEST

_DATA_NAME = re.compile(r"data/(\d{8,})/.+")
_SORTED_UNITS = 10**8
"""Up to here the order of names is that of numbers."""


def no_run(objects: ObjectStore) -> RunNotFound:
    """Return the error for a place without a `run.json`: nothing is there, or what is says why."""
    where = objects.url
    try:
        remains = find_remains(objects, 0) or _first(objects, keys.PLAN, FIRST_MANIFEST)
        begun = _first(objects, keys.PLAN) or _first(objects, keys.OWNERS)
    except CannotList:
        remains = begun = None
    if remains is not None:
        return RunNotFound(
            f"the run at {where} has lost its {keys.RUN}, though {remains} is there: restore it "
            "from a copy of the run"
        )
    if begun is not None:
        return RunNotFound(
            f"the run at {where} is being planned, or was interrupted in that: {begun} is there "
            f"and no {keys.RUN} yet. Look again later, or run its config again"
        )
    return RunNotFound(f"there is no run at {where}: it has no {keys.RUN}; check the location")


def _first(objects: ObjectStore, prefix: str, name: str | None = None) -> str | None:
    """Return the name of the first object in a folder, or of this one; None if it is not there."""
    found = (info.name for info in objects.list(prefix))
    return next((one for one in found if name is None or one == name), None)


def find_remains(objects: ObjectStore, first_unit: int) -> str | None:
    """Return the name of an object of unit `first_unit` or a later one; None if there is none.

    From 0 also what belongs to any run that began: its model and its snapshots. Costs a listing of
    what lies from that unit on, and ends with the first find.
    """
    sorted_from = 0 < first_unit < _SORTED_UNITS
    # The digit after a folder's name sorts behind everything inside the folder.
    folder = first_unit // keys.UNITS_PER_FOLDER
    after = f"{keys.COMMITS}{folder - 1:06d}0" if sorted_from and folder else ""
    for info in objects.list(keys.COMMITS, after=after):
        found = keys.parse_commit_key(info.name) or keys.parse_repair_mark(info.name)
        if found is not None and found[0] >= first_unit:
            return info.name
    after = f"{keys.DATA}{keys.unit_name(first_unit - 1)}0" if sorted_from else ""
    for info in objects.list(keys.DATA, after=after):
        match = _DATA_NAME.fullmatch(info.name)
        if match is not None and int(match[1]) >= first_unit:
            return info.name
    if first_unit:
        return None
    for info in objects.list(keys.SNAPSHOTS):
        return info.name
    try:
        objects.size(keys.MODEL)
    except ObjectNotFound:
        return None
    return keys.MODEL
