"""Runs the driver as a command does, with the fake worker, and keeps its log for a test to read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jobs.config import RunConfig
from jobs.driver import RunOptions, RunOutcome
from jobs.driver import run as run_job
from jobs.event_log import EventLog
from jobs.listing import prompt_rows
from jobs.progress import progress_view
from store import keys
from store.commit import committed_units, read_commit
from store.objects.open import open_store
from store.objects.protocol import ObjectStore
from store.run_format import Commit
from tests.jobs.fake_worker import FakeWorker

TEXTS = [f"w{i} w1 w2 w3" for i in range(10, 22)]
"""Twelve prompts of four tokens, two a unit."""


class Driven:
    """Runs configs with the fake worker and keeps the log."""

    def __init__(
        self,
        make_config: Callable[..., RunConfig],
        write_prompts: Callable[..., Path],
        faults: Callable[..., Path],
    ) -> None:
        self._make_config, self._write_prompts, self.faults = make_config, write_prompts, faults
        self.address: str | None = None
        """Of the Ray to use; None where the pool is not Ray's."""
        self.stream = io.StringIO()
        self.also: Callable[..., None] = lambda _event, **_fields: None

    def __call__(self, config: RunConfig, **options: bool) -> RunOutcome:
        log, quiet = NoticedLog(self), EventLog(stream=io.StringIO(), as_json=True)
        if config.workers.address is None and self.address is not None:
            workers = config.workers.model_copy(update={"address": self.address})
            config = config.model_copy(update={"workers": workers})
        view = lambda: progress_view(quiet)  # noqa: E731
        return run_job(config, RunOptions(worker=FakeWorker, **options), log, view)

    def config(
        self, records: Sequence[Any], name: str = "prompts.jsonl", **sections: Any
    ) -> RunConfig:
        """Write prompts to a file and return the config of a run over them."""
        return self._make_config(self._write_prompts(records, name), **sections)

    def events(self, name: str) -> list[dict[str, object]]:
        events = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [event for event in events if event["event"] == name]


class NoticedLog(EventLog):
    """Tells the test of each event too."""

    def __init__(self, driven: Driven) -> None:
        super().__init__(stream=driven.stream, as_json=True, every_unit=True)
        self._driven = driven

    def __call__(self, event: str, **fields: object) -> None:
        super().__call__(event, **fields)
        self._driven.also(event, **fields)


def commit_of(objects: ObjectStore, unit: int) -> Commit:
    return read_commit(objects, committed_units(objects)[unit])


def break_unit(objects: ObjectStore, unit: int) -> None:
    """Delete an object of a unit that its commit names."""
    objects.delete(keys.attempt_prefix(unit, commit_of(objects, unit).attempt) + "zarr.json")


def statuses(config: RunConfig) -> dict[str, tuple[str, str | None]]:
    rows = prompt_rows(open_store(config.output))
    return {row.prompt_id: (row.status, row.reason) for row in rows}


def names(config: RunConfig) -> list[str]:
    return sorted(p.as_posix() for p in Path(config.output).rglob("*") if p.is_file())
