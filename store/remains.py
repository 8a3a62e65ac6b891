"""What is left of units that no plan has: a plan that was there before, and is lost.

Rows are of the prompts of the plan that they were captured from. Before units are planned anew,
this looks for what was captured under their numbers. Knows names only; reads no object.
"""

from __future__ import annotations

import re

from store import keys
from store.errors import ObjectNotFound
from store.objects.protocol import ObjectStore

_DATA_NAME = re.compile(r"data/(\d{8,})/.+")
_SORTED_UNITS = 10**8
"""Up to here the order of names is that of numbers."""


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
