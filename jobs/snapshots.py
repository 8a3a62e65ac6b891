"""Snapshots written by the driver on the way, so that opening, resuming and status stay cheap.

A snapshot is derived and may fail without harm; it is written by a thread of its own, since reading
a few thousand commits takes longer than the driver may look away.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from store.errors import RunError, StoreError
from store.objects.protocol import ObjectStore
from store.snapshot import write_snapshot

COMMITS_PER_SNAPSHOT = 2000
_READERS = 8
_END_SECONDS = 300.0


class SnapshotKeeper:
    """Counts commits and writes a snapshot once there are enough new ones."""

    def __init__(
        self, objects: ObjectStore, run_id: str, every: int = COMMITS_PER_SNAPSHOT
    ) -> None:
        self._objects = objects
        self._run_id = run_id
        self._every = every
        self._new = 0
        self._thread: threading.Thread | None = None

    def note(self) -> None:
        """One more unit is committed."""
        self._new += 1
        busy = self._thread is not None and self._thread.is_alive()
        if self._new >= self._every and not busy:
            self._new = 0
            self._thread = threading.Thread(target=self._write, name="snapshot", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for the snapshot that is being written, for a while."""
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _write(self) -> None:
        write_snapshot_now(self._objects, self._run_id)


def write_snapshot_now(objects: ObjectStore, run_id: str) -> None:
    """Write a snapshot; where that fails there is none, and commits are the truth."""
    try:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="snapshot-read") as pool:
            write_snapshot(objects, run_id, pool.map)
    except (RunError, StoreError):
        return  # The next one, or nobody, will miss it.
