"""Structured logs: one event a line with its fields, as text for people or JSON for machines.

Every line carries the run's id; units, attempts, workers and ranks are fields, never prose, so that
logs of many drivers can be searched together.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

_SHOWN_ROWS = 14
_SHOWN_OF_NODE = 8

QUIET_EVENTS = frozenset({"assigned", "committed", "superseded"})
"""Events of every unit: written only when asked for, since a run may have a million units."""


class EventLog:
    """Writes events to a stream; usable from several threads.

    Every event has its run; what belongs to a unit has `unit` and `attempt` (`units` and `attempts`
    where a worker held several) and `worker`, and `rank` where it came from one rank of several.
    JSON lines keep a field that is None, as null; lines for people leave it out.
    """

    def __init__(
        self,
        run_id: str = "",
        *,
        stream: TextIO | None = None,
        as_json: bool = False,
        every_unit: bool = False,
    ) -> None:
        self.run_id = run_id
        self.stream = stream if stream is not None else sys.stderr
        self.as_json = as_json
        self._every_unit = every_unit
        self._lock = threading.Lock()
        self.around: Callable[[Callable[[], None]], None] = lambda write: write()
        """Called with the write; a live display hides itself around it."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Write one event. Multi-line values (tracebacks) are shown last, indented."""
        if event in QUIET_EVENTS and not self._every_unit:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self.as_json:
            body = {"time": now, "event": event, "run": self.run_id, **fields}
            text = json.dumps(body, default=str, ensure_ascii=False)
        else:
            text = _plain(now, event, fields)
        with self._lock:
            self.around(lambda: print(text, file=self.stream, flush=True))


def _plain(now: str, event: str, fields: dict[str, Any]) -> str:
    short = {key: str(value) for key, value in fields.items() if value is not None}
    if "node" in short:
        short["node"] = short["node"][:_SHOWN_OF_NODE]
    long = {key: text for key, text in short.items() if "\n" in text.strip()}
    words = [f"{key}={text}" for key, text in short.items() if key not in long]
    line = " ".join([now[11:19], event, *words])
    for key, text in long.items():
        rows = text.strip().splitlines()
        shown = rows if len(rows) <= _SHOWN_ROWS else [rows[0], "...", *rows[2 - _SHOWN_ROWS :]]
        indented = "\n".join(f"    {row}" for row in shown)
        line += f"\n  {key}:\n{indented}"
    return line
