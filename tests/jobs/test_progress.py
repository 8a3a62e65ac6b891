"""Progress and logs: for people on a terminal, for people in a file, for machines."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from jobs import progress as progress_module
from jobs.event_log import EventLog
from jobs.progress import progress_view
from tests.jobs.test_metrics import SNAPSHOT


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_every_ten_seconds_and_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    view = progress_view(EventLog(stream=stream))
    for seconds in (0, 1, 9, 11, 12):
        clock[0] = 100.0 + seconds
        view.show(SNAPSHOT)
    view.close(replace(SNAPSHOT, units_done=10))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("progress 3/10 units, 30 prompts stored, 1 failed, 3.0 prompts/s")
    assert "8 MB in flight" in lines[0]
    assert "stages put=1.5s" in lines[0]
    assert lines[-1].startswith("progress 10/10 units")


def test_machines_get_every_figure() -> None:
    stream = io.StringIO()
    progress_view(EventLog("r" * 32, stream=stream, as_json=True)).show(SNAPSHOT)
    body = json.loads(stream.getvalue())
    assert (body["event"], body["run"]) == ("progress", "r" * 32)
    assert body["tokens_per_second"] == 300
    assert body["bytes_per_second"] == 600_000
    assert body["eta_seconds"] == 20
    assert body["stalls"] == {"put": 1.5}


def test_a_terminal_shows_the_figures_and_logs_do_not_tear_them() -> None:
    terminal = Terminal()
    log = EventLog("r" * 32, stream=terminal)
    view = progress_view(log)
    log.around = view.around
    view.show(SNAPSHOT)
    log("worker lost", worker=3)
    view.close(SNAPSHOT)
    shown = terminal.getvalue()
    assert "3/10 units" in shown
    assert "30 prompts stored, 1 failed" in shown
    assert "worker lost worker=3\n" in shown


def test_a_log_line_has_its_fields_and_a_long_error_both_ends() -> None:
    stream = io.StringIO()
    error = "\n".join(
        ["Traceback (most recent call last):", *(f"row {i}" for i in range(40)), "E: no"]
    )
    fields = {"unit": 7, "attempt": "1-ab", "worker": 2, "rank": None, "node": "0123456789abcdef"}
    EventLog(stream=stream)("unit failed", **fields, error=error)
    text = stream.getvalue()
    assert " unit failed unit=7 attempt=1-ab worker=2 node=01234567\n" in text
    assert "Traceback (most recent call last):" in text
    assert "E: no" in text
    assert "row 5\n" not in text


def test_json_logs_carry_the_run_and_whole_errors() -> None:
    stream = io.StringIO()
    EventLog("r" * 32, stream=stream, as_json=True)("unit failed", unit=7, error="a\nb")
    body = json.loads(stream.getvalue())
    assert (body["run"], body["unit"], body["error"]) == ("r" * 32, 7, "a\nb")
    assert body["time"].endswith("Z")


def test_events_of_every_unit_are_written_only_if_asked_for() -> None:
    for asked, lines in ((False, 0), (True, 1)):
        stream = io.StringIO()
        EventLog(stream=stream, every_unit=asked)("committed", unit=1)
        assert len(stream.getvalue().splitlines()) == lines
