"""Whether a back end keeps the one promise that commits rest on, found out before a run starts.

And whether it takes objects at all, when it refused some.
"""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

from store import keys
from store.errors import ObjectExists, RunError, StoreError, StoreNotAtomic
from store.objects.protocol import ObjectStore

RACERS = 8
ROUNDS = 3
_START_SECONDS = 30.0


def probe_create_only(objects: ObjectStore) -> None:
    """Create one name twice, then race several writers for others; leaves nothing behind.

    Raises `StoreNotAtomic` if a second create succeeds, if not exactly one racer wins, or if what
    is read back is not the winner's. Costs a few dozen small requests.
    """
    token = secrets.token_hex(8)
    for round_number in range(ROUNDS):
        name = f"{keys.CHECKS}probe-{token}-{round_number}"
        try:
            if round_number == 0:
                winners = [body for body in (b"first", b"second") if _wins(objects, name, body)]
            else:
                winners = _race(objects, name)
            stored = objects.get(name, max_bytes=1 << 10)
        finally:
            objects.delete(name)
        if winners != [stored]:
            raise StoreNotAtomic(
                f"{objects.url}: of several writers that create one object {len(winners)} were "
                "told "
                "that they won; a run stored there could be overwritten unnoticed. Use another "
                "location, or a server that honours If-None-Match"
            )


def takes_objects(objects: ObjectStore) -> bool:
    """Return whether an object can be put, read back and deleted just now."""
    name, body = f"{keys.CHECKS}probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
    try:
        try:
            objects.put(name, [body])
            return objects.get(name, max_bytes=1 << 10) == body
        finally:
            objects.delete(name)
    except (StoreError, RunError):
        return False


def _wins(objects: ObjectStore, name: str, body: bytes) -> bool:
    try:
        objects.create(name, body)
    except ObjectExists:
        return False
    return True


def _race(objects: ObjectStore, name: str) -> list[bytes]:
    gate = threading.Barrier(RACERS)

    def race(body: bytes) -> bool:
        gate.wait(_START_SECONDS)
        return _wins(objects, name, body)

    bodies = [f"racer {number}".encode() for number in range(RACERS)]
    with ThreadPoolExecutor(RACERS, thread_name_prefix="probe") as pool:
        won = list(pool.map(race, bodies))
    return [body for body, winner in zip(bodies, won, strict=True) if winner]
