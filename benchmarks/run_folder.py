"""A run's folder while a benchmark fills it: when writing begins, and what may go.

Threads delete the data of committed units, the oldest first, once more than `keep_bytes` of it lies
there, so that a small memory file system takes a run of any length. It knows nothing of the
capture: it sees files, and is told of commits.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from pathlib import Path

from store import keys

WATCH_SECONDS = 0.005
SWEEPERS = 4
"""A memory file system frees several GB/s per thread, slower than a GPU's host may write."""
STOP_SECONDS = 60.0


def settle() -> None:
    """Return when what was written or deleted before keeps no disk busy any more."""
    os.sync()


class RunFolder:
    """Watches one local run folder from its creation on; deletes it when the benchmark is done."""

    def __init__(self, folder: Path, keep_bytes: int | None) -> None:
        self.folder, self._keep_bytes = folder, keep_bytes
        self.first_write: float | None = None
        """`time.perf_counter()` of the first file that is there."""
        self.deleted_bytes = 0
        self.waited_seconds = 0.0
        """What the run lost by waiting for the deleting threads."""
        self._committed: deque[tuple[Path, int]] = deque()
        self._held = 0
        self._unswept = 0
        """Of what is held, what no thread is deleting yet."""
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, name="bench-watch", daemon=True),
            *(
                threading.Thread(target=self._sweep, name=f"bench-sweep-{number}", daemon=True)
                for number in range(SWEEPERS)
            ),
        ]
        for thread in self._threads:
            thread.start()

    def committed(self, unit: int, num_bytes: int) -> None:
        """Hear of a commit; waits while more than twice of what may be kept lies there."""
        if self._keep_bytes is None:
            return
        started = time.perf_counter()
        with self._changed:
            self._committed.append((self.folder / keys.DATA / keys.unit_name(unit), num_bytes))
            self._held += num_bytes
            self._unswept += num_bytes
            self._changed.notify_all()
            most = max(2 * self._keep_bytes, num_bytes)
            self._changed.wait_for(lambda: self._held <= most or self._stopped.is_set())
        self.waited_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Stop the threads and delete the run; return once the file system has settled."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(STOP_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)
        settle()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            if any(files for _, _, files in os.walk(self.folder)):
                self.first_write = time.perf_counter()
                return
            time.sleep(WATCH_SECONDS)

    def _sweep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._stopped.is_set())
                if self._stopped.is_set():
                    return
                folder, num_bytes = self._committed.popleft()
                self._unswept -= num_bytes
            shutil.rmtree(folder)
            with self._changed:
                self._held -= num_bytes
                self.deleted_bytes += num_bytes
                self._changed.notify_all()

    @property
    def _over(self) -> bool:
        return self._keep_bytes is not None and self._unswept > self._keep_bytes
