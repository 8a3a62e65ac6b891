"""How far a run is: a live display on a terminal, plain lines elsewhere, JSON lines for machines.

All three show the same `Snapshot`, which the driver takes; the ETA goes by bytes, since units
differ in size. Knows nothing of Ray or of stores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobs.event_log import EventLog
from store.byte_count import human_bytes

LINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run's progress at one moment."""

    units_done: int
    units_planned: int
    prompts_stored: int
    prompts_failed: int
    tokens: int
    bytes: int
    tokens_planned: int
    """Tokens of the units that this driver had to do."""
    seconds: float
    workers_ready: int
    workers_asked: int
    units_in_flight: int
    bytes_in_flight: int
    retries: int
    workers_lost: int
    stalls: dict[str, float] = field(default_factory=dict)
    """Cause -> seconds that ranks waited for it."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def prompts_per_second(self) -> float:
        return self.prompts_stored / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Time left by bytes: bytes follow the tokens still to do."""
        if not self.tokens:
            return None
        return self.seconds * (self.tokens_planned - self.tokens) / self.tokens


class ProgressView(Protocol):
    """Something that shows snapshots."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the newest snapshot; called often."""

    def close(self, snapshot: Snapshot | None) -> None:
        """Show the last one and give the terminal back."""

    def around(self, write: Callable[[], None]) -> None:
        """Do a write to the terminal without tearing the display."""


def progress_view(log: EventLog) -> ProgressView:
    """Return the view that fits the log: its events as JSON, a terminal, or lines in a file."""
    if not log.as_json and log.stream.isatty():
        return TerminalView(log.stream)
    return LineView(log)


class LineView:
    """A line every `LINE_SECONDS`."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._last = -LINE_SECONDS

    def show(self, snapshot: Snapshot) -> None:
        """Write a line if it is time for one."""
        now = time.monotonic()
        if now - self._last >= LINE_SECONDS:
            self._last = now
            self._write(snapshot)

    def close(self, snapshot: Snapshot | None) -> None:
        """Write the last line."""
        if snapshot is not None:
            self._write(snapshot)

    def around(self, write: Callable[[], None]) -> None:
        """Lines need no care."""
        write()

    def _write(self, snapshot: Snapshot) -> None:
        if self._log.as_json:
            self._log("progress", **asdict(snapshot), **_rates(snapshot))
        else:
            print(summary_line(snapshot), file=self._log.stream, flush=True)


class TerminalView:
    """A bar and the figures, redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()
        self._last = 0.0

    def show(self, snapshot: Snapshot) -> None:
        """Redraw, at most five times a second."""
        now = time.monotonic()
        if now - self._last >= 0.2:
            self._last = now
            self._live.update(_drawn(snapshot), refresh=True)

    def close(self, snapshot: Snapshot | None) -> None:
        """Draw the last state and leave it on the screen."""
        if snapshot is not None:
            self._live.update(_drawn(snapshot), refresh=True)
        self._live.stop()

    def around(self, write: Callable[[], None]) -> None:
        """Take the display away while something else is written."""
        self._live.stop()
        write()
        self._live.start()


def summary_line(snapshot: Snapshot) -> str:
    """Return a snapshot as one plain line."""
    eta = snapshot.eta_seconds
    words = [
        f"{snapshot.units_done}/{snapshot.units_planned} units",
        f"{snapshot.prompts_stored} prompts stored",
        f"{snapshot.prompts_failed} failed",
        f"{snapshot.prompts_per_second:.1f} prompts/s",
        f"{snapshot.tokens_per_second:.0f} tok/s",
        f"{human_bytes(snapshot.bytes_per_second)}/s",
        f"{human_bytes(snapshot.bytes_in_flight)} in flight",
        f"{snapshot.workers_ready}/{snapshot.workers_asked} workers",
        f"{snapshot.retries} retries",
    ]
    if snapshot.stalls:
        words.append("stages " + " ".join(f"{k}={v:.1f}s" for k, v in snapshot.stalls.items()))
    if eta is not None:
        words.append(f"eta {human_seconds(eta)}")
    return "progress " + ", ".join(words)


def human_seconds(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def _rates(snapshot: Snapshot) -> dict[str, float | None]:
    return {
        "tokens_per_second": snapshot.tokens_per_second,
        "prompts_per_second": snapshot.prompts_per_second,
        "bytes_per_second": snapshot.bytes_per_second,
        "eta_seconds": snapshot.eta_seconds,
    }


def _drawn(snapshot: Snapshot) -> Table:
    eta = snapshot.eta_seconds
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(snapshot.units_planned, 1), completed=snapshot.units_done, width=40)
    grid.add_row(
        bar,
        Text(f"{snapshot.units_done}/{snapshot.units_planned} units"),
        Text(f"eta {human_seconds(eta)}" if eta is not None else "starting"),
    )
    grid.add_row(
        Text(
            f"{snapshot.prompts_stored} prompts stored, {snapshot.prompts_failed} failed, "
            f"{human_bytes(snapshot.bytes)}"
        ),
        Text(f"{snapshot.tokens_per_second:.0f} tok/s"),
        Text(f"{human_bytes(snapshot.bytes_per_second)}/s"),
    )
    grid.add_row(
        Text(
            f"{snapshot.workers_ready}/{snapshot.workers_asked} workers, "
            f"{snapshot.units_in_flight} units in flight ({human_bytes(snapshot.bytes_in_flight)})"
        ),
        Text(f"{snapshot.retries} retries"),
        Text(" ".join(f"{k} {v:.1f}s" for k, v in snapshot.stalls.items())),
    )
    return grid
