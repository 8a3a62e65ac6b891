"""What a process and its children hold in memory, second by second, while something else runs.

Reads `/proc` only. *pss* counts a page that several processes map once, so slabs that writer
processes share are not counted for each. The files of a run in a memory file system are not mapped
by anyone and count nowhere.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

EVERY_SECONDS = 1.0
STOP_SECONDS = 30.0
_MINUTE = 60.0
_FIELDS = {"Rss": "rss", "Pss": "pss", "Pss_Anon": "anonymous", "Pss_Shmem": "shared_memory"}


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes of the whole process tree at one time. `shared_memory` holds the slabs."""

    seconds: float
    rss: int
    pss: int
    anonymous: int
    shared_memory: int
    device: int
    processes: int


def process_tree(root: int) -> list[int]:
    """Return a process and everything below it that still runs."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                waiting += [int(child) for child in task.read_text().split()]
            except OSError:
                continue  # it ended meanwhile
    return found


def sample(root: int, seconds: float, device: int = 0) -> Sample:
    """Return what the tree under `root` holds now."""
    total = dict.fromkeys(_FIELDS.values(), 0)
    pids = process_tree(root)
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if name in _FIELDS:
                total[_FIELDS[name]] += int(value.split()[0]) << 10
    return Sample(seconds, **total, device=device, processes=len(pids))


class MemoryWatch:
    """Samples this process and its children each second, in a thread of its own."""

    def __init__(self, device_bytes: Callable[[], int] = lambda: 0) -> None:
        self.samples: list[Sample] = []
        self._device_bytes = device_bytes
        self._started = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="bench-memory", daemon=True)
        self._thread.start()

    def stop(self) -> list[Sample]:
        """Stop, with one more sample, and return all of them."""
        self._stopped.set()
        self._thread.join(STOP_SECONDS)
        self._take()
        return self.samples

    def _work(self) -> None:
        while not self._stopped.is_set():
            self._take()
            self._stopped.wait(EVERY_SECONDS)

    def _take(self) -> None:
        seconds = time.monotonic() - self._started
        self.samples.append(sample(os.getpid(), seconds, self._device_bytes()))


def summary(samples: Sequence[Sample], before: Sample, budget_bytes: int) -> dict[str, Any]:
    """Return means by minute, first against last minute, and the most above `before`.

    `budget_bytes` is what capture may hold besides the engine: its slabs and its buffers.
    """
    last = samples[-1].seconds
    minutes = []
    for minute in range(int(last // _MINUTE) + 1):
        of = [one for one in samples if minute * _MINUTE <= one.seconds < (minute + 1) * _MINUTE]
        if of:
            minutes.append({"minute": minute, **_means(of)})
    first_of = [one for one in samples if one.seconds <= _MINUTE]
    last_of = [one for one in samples if one.seconds >= last - _MINUTE]
    above = max(one.pss for one in samples) - before.pss
    return {
        "seconds": last,
        "before": asdict(before),
        "minutes": minutes,
        "first_minute": _means(first_of),
        "last_minute": _means(last_of),
        "most": {name: max(getattr(one, name) for one in samples) for name in _names()},
        "most_above_before": above,
        "budget": budget_bytes,
        "within_budget": above <= budget_bytes,
    }


def _names() -> tuple[str, ...]:
    return (*_FIELDS.values(), "device")


def _means(samples: Sequence[Sample]) -> dict[str, int]:
    return {name: int(np.mean([getattr(one, name) for one in samples])) for name in _names()}
