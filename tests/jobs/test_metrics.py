"""Metrics and their dashboard name the same things, and every metric comes from a snapshot."""

from __future__ import annotations

import json
import re
from pathlib import Path

from jobs.metrics import EXPORTED, GAUGES, PREFIX, STAGES
from jobs.progress import Snapshot, human_seconds, summary_line

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana-dashboard.json"
SNAPSHOT = Snapshot(
    units_done=3, units_planned=10, prompts_stored=30, prompts_failed=1, tokens=3000,
    bytes=6_000_000, tokens_planned=9000, seconds=10.0, workers_ready=2, workers_asked=3,
    units_in_flight=4, bytes_in_flight=8_000_000, retries=1, workers_lost=1, stalls={"put": 1.5},
)  # fmt: skip


def test_the_dashboard_draws_exactly_the_metrics_there_are() -> None:
    text = DASHBOARD.read_text()
    drawn = set(re.findall(rf"{EXPORTED}{PREFIX}(\w+)", text))
    assert drawn == {metric.name for metric in (*GAUGES, STAGES)}
    places = [panel["gridPos"] for panel in json.loads(text)["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)


def test_every_metric_has_a_value_in_a_snapshot() -> None:
    for metric in (*GAUGES, STAGES):
        assert getattr(SNAPSHOT, metric.field) is not None


def test_the_time_left_goes_by_what_is_left_to_store() -> None:
    assert SNAPSHOT.eta_seconds == 20.0
    line = summary_line(SNAPSHOT)
    assert "3/10 units" in line
    assert "600 kB/s" in line
    assert "eta 20 s" in line


def test_numbers_are_written_for_people() -> None:
    assert [human_seconds(n) for n in (5, 65, 3700, 90_000)] == [
        "5 s", "1 min 5 s", "1 h 1 min", "1 d 1 h",
    ]  # fmt: skip
