"""One engine started and ended again, for what it stores when it starts: the W_O of the model.

Knows a pool and what it says; never knows units. A run whose units are all sound so needs no unit
captured again to get its W_O back.
"""

from __future__ import annotations

import time

from jobs.errors import RunInterrupted, RunStopped
from jobs.messages import LossCause, Lost, Started, StartFailed, WorkerFacts
from jobs.pool import WorkerPool

POLL_SECONDS = 0.25


def start_once(pool: WorkerPool, deadline_seconds: float) -> WorkerFacts:
    """Start one worker, end it, and return what it said of itself.

    Raises `RunStopped` where its engine fails, `RunInterrupted` where its node does or nothing has
    started within `deadline_seconds`.
    """
    until = time.monotonic() + deadline_seconds
    worker = pool.spawn()
    try:
        while time.monotonic() < until:
            for event in pool.poll(POLL_SECONDS):
                if isinstance(event, Started):
                    return event.facts
                if isinstance(event, StartFailed | Lost):
                    ended = RunStopped if event.cause is LossCause.DIED else RunInterrupted
                    raise ended(f"no worker would start; the last error:\n{event.error}")
    finally:
        pool.kill(worker)
    raise RunInterrupted(
        f"no engine started within {deadline_seconds:g} s; run the same command again"
    )
