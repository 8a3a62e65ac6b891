"""Metrics and their dashboard name the same things, and every metric comes from a snapshot."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from jobs.metrics import BOUND, EXPORTED, GAUGES, PREFIX, STAGES, RunMetrics
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
    assert drawn == {metric.name for metric in (*GAUGES, STAGES, BOUND)}
    places = [panel["gridPos"] for panel in json.loads(text)["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)


def test_every_metric_has_a_value_in_a_snapshot() -> None:
    for metric in (*GAUGES, STAGES, BOUND):
        assert getattr(SNAPSHOT, metric.field) is not None


def test_the_stage_that_bounds_the_run_is_one_and_says_what_to_change(monkeypatch) -> None:
    seen: dict[tuple[str, str | None], float] = {}

    class Gauge:
        def __init__(self, name: str, _text: str, tag_keys: tuple[str, ...]) -> None:
            self.name, self.keys = name, set(tag_keys)

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == self.keys
            if self.name == PREFIX + BOUND.name:
                assert tags["advice"]
            seen[self.name, tags.get("stage")] = value

    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    metrics = RunMetrics("r")
    bound = PREFIX + BOUND.name
    metrics.set(SNAPSHOT)
    assert not [name for name, _ in seen if name == bound], "nothing tells it yet"
    for stalls, stage in (
        ({"engine": 1.0, "wait": 9.0, "put": 1.5}, "put"),
        ({"engine": 9.0, "wait": 1.0, "put": 1.5}, "engine"),
    ):
        metrics.set(replace(SNAPSHOT, stalls=stalls))
        assert {s: value for (name, s), value in seen.items() if name == bound and value} == {
            stage: 1.0
        }


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
