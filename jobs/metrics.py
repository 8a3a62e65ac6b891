"""The run's progress as Prometheus metrics, through Ray's own exporter on every node.

Made and set in the driver, which is a Ray process and hears of every unit; engine processes are
not, and could export nothing. `docs/grafana-dashboard.json` draws exactly these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jobs.bound import ADVICE, find_bound
from jobs.progress import Snapshot

PREFIX = "attnstore_"
EXPORTED = "ray_"
"""Ray puts this before every name it exports."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name without `PREFIX`, what it says, and the snapshot field it comes from."""

    name: str
    text: str
    field: str


GAUGES = (
    Metric("units_planned", "Units of the plan", "units_planned"),
    Metric("units_done", "Units with a commit", "units_done"),
    Metric("units_in_flight", "Units that workers hold", "units_in_flight"),
    Metric("bytes_in_flight", "Raw bytes of the units that workers hold", "bytes_in_flight"),
    Metric("workers_asked", "Workers asked for", "workers_asked"),
    Metric("workers_ready", "Workers whose engine runs", "workers_ready"),
    Metric("prompts_stored", "Prompts stored by this driver", "prompts_stored"),
    Metric("prompts_failed", "Prompts recorded as failed by this driver", "prompts_failed"),
    Metric("tokens", "Rows stored by this driver", "tokens"),
    Metric("bytes", "Bytes stored by this driver", "bytes"),
    Metric("retries", "Failures charged to units", "retries"),
    Metric("workers_lost", "Workers lost", "workers_lost"),
    Metric("eta_seconds", "Time left, by bytes", "eta_seconds"),
)
STAGES = Metric(
    "stage_seconds",
    "Seconds in each stage: engine, wait for storing, idle, copy, encode, put, commit",
    "stalls",
)
BOUND = Metric("bound", "1 for the stage that bounds the run; `advice` is what to change", "stalls")


class RunMetrics:
    """Sets Ray's metrics from snapshots. Needs a connected Ray."""

    def __init__(self, run_id: str) -> None:
        from ray.util.metrics import Gauge

        self._tags = {"run": run_id}
        self._gauges: dict[str, Any] = {
            metric.field: Gauge(PREFIX + metric.name, metric.text, tag_keys=("run",))
            for metric in GAUGES
        }
        self._stages = Gauge(PREFIX + STAGES.name, STAGES.text, tag_keys=("run", "stage"))
        self._bound = Gauge(PREFIX + BOUND.name, BOUND.text, tag_keys=("run", "stage", "advice"))

    def set(self, snapshot: Snapshot) -> None:
        """Export one snapshot."""
        for field, gauge in self._gauges.items():
            value = getattr(snapshot, field)
            if value is not None:
                gauge.set(float(value), tags=self._tags)
        for stage, seconds in snapshot.stalls.items():
            self._stages.set(seconds, tags={**self._tags, "stage": stage})
        bound = find_bound(snapshot.stalls)
        if bound is not None:
            for stage, advice in ADVICE.items():
                tags = {**self._tags, "stage": stage, "advice": advice}
                self._bound.set(float(stage == bound.stage), tags=tags)
