"""Where an engine's time goes, so that a run can say which stage bounds it. Knows no engine.

The engine's own thread computes, waits for storing or has no unit; the ranks' storing threads tell
their own seconds in their reports. `jobs.bound` draws the conclusion.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from capture.assembly import RankReport


@dataclass(slots=True)
class EngineClock:
    """Seconds of the engine's thread since they were last taken."""

    engine: float = 0.0
    """In forward passes, and in waiting for host slabs before them, which ranks tell apart."""
    wait: float = 0.0
    """Nothing to compute: all units in flight wait for what they stored to be durable."""
    idle: float = 0.0
    """No unit in flight between one and the next."""
    empty_since: float | None = None

    def emptied(self) -> None:
        """Note that no unit is in flight any more."""
        self.empty_since = time.monotonic()

    def admitted(self) -> None:
        """Note that there is a unit again."""
        if self.empty_since is not None:
            self.idle += time.monotonic() - self.empty_since
            self.empty_since = None

    def taken(self) -> dict[str, float]:
        """Return the seconds by name and begin anew."""
        spent = {"engine": self.engine, "wait": self.wait, "idle": self.idle}
        self.engine = self.wait = self.idle = 0.0
        return spent


def stage_seconds(reports: Sequence[RankReport], spent: dict[str, float]) -> dict[str, float]:
    """Return seconds by stage: the ranks' threads together, and the engine's own time.

    A rank waits for slabs inside a step, all ranks at once: that is waiting, not computing.
    """
    total: dict[str, float] = {}
    for report in reports:
        for stage, seconds in report.timings.items():
            total[stage] = total.get(stage, 0.0) + seconds
    total.pop("stall", None)
    stall = max((report.timings.get("stall", 0.0) for report in reports), default=0.0)
    waited = min(stall, spent["engine"])
    return {
        **total,
        "engine": spent["engine"] - waited,
        "wait": spent["wait"] + waited,
        "idle": spent["idle"],
    }
