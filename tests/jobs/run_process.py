"""`attnstore run` as a process of its own, its events read as they come, for tests to strike at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from jobs.listing import prompt_rows
from store.objects.open import open_store
from store.verify import verify_run

SLOW = {"max_num_batched_tokens": 96, "max_num_seqs": 8}
"""An engine of small steps: a tiny model takes its seconds, and a strike meets it at work."""


def texts(count: int) -> list[str]:
    """So many prompts of about a dozen tokens, no two alike."""
    return [f"prompt number {i} looks back at what came before it" for i in range(count)]


ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 600.0
"""Long enough for the most loaded machine: no test waits for a time, all wait for events."""


class RunProcess:
    """One driver. Use as a context manager: whatever is left of it is killed."""

    def __init__(
        self, config: Path, *arguments: str, main: Sequence[str] = ("-m", "jobs.cli"), **env: str
    ) -> None:
        command = [sys.executable, *main, "run", str(config), "--json", "--log-units", *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.events: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="run-events", daemon=True)
        self._reader.start()

    def __enter__(self) -> RunProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                _kill(child.pid)
            self.process.kill()
        self.process.wait(30)

    def wait_for(
        self, event: str, count: int | Callable[[dict[str, Any]], bool] = 1
    ) -> list[dict[str, Any]]:
        """Wait until so many events of this name have come, or one of which `count` is true;
        return them."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        wanted = count if callable(count) else lambda _event: True
        count = 1 if callable(count) else count
        with self._changed:
            while len(found := [one for one in self.named(event) if wanted(one)]) < count:
                left = deadline - time.monotonic()
                ended = self.process.poll() is not None and not self._reader.is_alive()
                if left <= 0 or ended:
                    raise AssertionError(
                        f"{len(found)} of {count} {event!r} events came, exit code "
                        f"{self.process.poll()}:\n{self.transcript()}"
                    )
                self._changed.wait(min(left, 0.5))
        return found

    def named(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one.get("event") == event]

    def finish(self) -> int:
        """Wait for the end and return the exit code."""
        try:
            code = self.process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run does not end:\n{self.transcript()}") from None
        self._reader.join(10)
        return code

    def kill(self) -> None:
        """SIGKILL the driver alone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def worker_pid(self, number: int = 0) -> int:
        """The process of the `number`-th worker that started."""
        return int(self.wait_for("worker started", number + 1)[number]["pid"])

    def rank_pid(self, rank: int, number: int = 0) -> int:
        """The process of a rank above the first of a worker's engine."""
        children = psutil.Process(self.worker_pid(number)).children()
        ranks = [child for child in children if _is_rank(child)]
        return int(sorted(ranks, key=lambda child: child.pid)[rank].pid)

    def transcript(self) -> str:
        lines = [json.dumps(event) for event in self.events if event.get("event") != "progress"]
        return "\n".join([*lines[-40:], *self.other[-40:]])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                try:
                    self.events.append(json.loads(line))
                except ValueError:
                    self.other.append(line.rstrip())
                self._changed.notify_all()


def _is_rank(child: psutil.Process) -> bool:
    return "spawn_main" in " ".join(child.cmdline()) or "VLLM" in child.name()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def assert_complete(output: str | Path, *, failed: Sequence[str] = (), options: Any = None) -> None:
    """Every prompt of the plan is stored once, but for `failed`, and every stored byte is sound."""
    objects = open_store(str(output), options)
    rows = list(prompt_rows(objects))
    assert max(Counter(row.prompt_id for row in rows).values()) == 1
    assert {row.prompt_id: row.status for row in rows if row.status != "stored"} == dict.fromkeys(
        failed, "failed"
    )
    report = verify_run(objects, deep=True)
    assert report.ok, report.problems[:5]


def object_stamps(output: Path) -> dict[str, tuple[int, int]]:
    """Name -> (size, change time) of every object of a local run."""
    return {
        path.relative_to(output).as_posix(): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in output.rglob("*")
        if path.is_file()
    }
