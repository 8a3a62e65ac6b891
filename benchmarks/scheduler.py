"""The driver's own cost at scale: 10^6 units dispatched to fake workers, and resumed halfway.

    python -m benchmarks.scheduler [--units 1000000] [--prompts 200000]

The real `Schedule` and `Dispatcher` run against a pool that answers at once, with one in a thousand
units failing and one in ten thousand workers dying. What is measured is the driver alone: CPU per
unit and memory. Resuming reads a stored plan, the newest snapshot and the listing after it from
local disk, as a driver does before it asks for workers. Planning runs for real, tokenizer and
Parquet included, on a word-level tokenizer; its figure is per prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from capture.settings import EngineFacts, UnitResult, UnitStatus
from jobs import messages
from jobs.config_file import parse_config
from jobs.dispatch import Dispatcher
from jobs.fleet import DispatchLimits
from jobs.plan import read_unit_table, write_plan
from jobs.prepare import done_mask
from jobs.schedule import Schedule, UnitTable
from store.committed_units import COLUMNS
from store.keys import SNAPSHOTS, UNITS_PER_FOLDER, commit_key
from store.objects.open import open_store
from store.objects.protocol import ObjectStore
from store.parquet_file import write_parquet
from store.plan import UNIT_FIELDS, read_segments
from store.plan_writer import write_segment
from store.run_format import LayerSemantics, ModelManifest, SnapshotManifest
from store.snapshot import EXCEPTIONS_FILE, MANIFEST, UNITS_FILE, find_committed

UNIT_FAILURES = 1e-3
WORKER_DEATHS = 1e-4


class InstantPool:
    """Workers that finish whatever they get at the next poll; some fail, some die."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._events: deque[messages.PoolEvent] = deque()
        self._held: dict[messages.WorkerId, deque[messages.UnitOrder]] = {}
        self._next = 0

    def spawn(self) -> messages.WorkerId:
        number, self._next = self._next, self._next + 1
        self._held[number] = deque()
        facts = messages.WorkerFacts("node", number, EngineFacts(_MODEL, 64), 0.0)
        self._events += [messages.Placed(number), messages.Started(number, facts)]
        return number

    def send(self, worker: messages.WorkerId, order: messages.UnitOrder | None) -> None:
        held = self._held[worker]
        if order is not None:
            held.append(order)
            if len(held) < 2 and not order.batch_prompts:
                self._events.append(messages.Reported(worker, messages.WorkReport()))
                return
        if self._random.random() < WORKER_DEATHS:
            self._events.append(messages.Lost(worker, messages.LossCause.DIED, "killed"))
            return
        results = (self._result(held.popleft()),) if held else ()
        self._events.append(messages.Reported(worker, messages.WorkReport(results=results)))

    def kill(self, worker: messages.WorkerId) -> None:
        self._held.pop(worker, None)

    def poll(self, timeout: float) -> list[messages.PoolEvent]:
        del timeout
        events = [event for event in self._events if event.worker in self._held]
        self._events.clear()
        return events

    def _result(self, order: messages.UnitOrder) -> UnitResult:
        failed = self._random.random() < UNIT_FAILURES
        return UnitResult(
            order.unit,
            order.attempt,
            UnitStatus.FAILED if failed else UnitStatus.COMMITTED,
            error="made up" if failed else None,
            stored=order.num_prompts,
            tokens=order.num_tokens,
            bytes=order.num_tokens * 64,
        )


def simulate(num_units: int, workers: int, done: np.ndarray) -> dict[str, Any]:
    """Dispatch every unit that is not done; return what it cost."""
    lengths = np.random.default_rng(0).integers(1_000, 65_536, num_units)
    ones = np.ones(num_units, np.int64)
    units = UnitTable(0 * ones, np.arange(num_units), ones, lengths)
    started, cpu = time.perf_counter(), time.process_time()
    schedule = Schedule(units, done, max_attempts=3)
    seconds_to_start = time.perf_counter() - started
    missing = schedule.num_missing
    limits = DispatchLimits(lowest=1, highest=workers)
    dispatcher = Dispatcher(schedule, InstantPool(0), limits, lambda _event, **_fields: None)
    clock, memory = 0.0, []
    while not dispatcher.finished:
        dispatcher.step(clock, 0.0)
        clock += 1.0
        if int(clock) % 250 == 0:
            memory.append(_resident_mb())
    return {
        "units": missing,
        "workers": workers,
        "seconds_to_make_schedule": round(seconds_to_start, 2),
        "driver_cpu_microseconds_per_unit": round((time.process_time() - cpu) / missing * 1e6, 1),
        "units_committed": dispatcher.counters.committed,
        "failures_charged": dispatcher.counters.retries,
        "workers_lost": dispatcher.counters.workers_lost,
        "resident_mb_first_and_last": [memory[0], memory[-1]] if memory else None,
    }


def resume(num_units: int) -> dict[str, Any]:
    """Return what it takes to know what is missing of a stored run of which half is committed."""
    with tempfile.TemporaryDirectory() as name:
        objects = open_store(name)
        numbers = np.arange(num_units)
        ids = [f"p{number}" for number in range(num_units)]
        prompts = pa.table(
            {
                "prompt_id": ids,
                "text": pa.nulls(num_units, pa.string()),
                "token_ids": pa.array([[1]] * num_units, pa.list_(pa.int32())),
                "token_strings": pa.array([["a"]] * num_units, pa.list_(pa.string())),
                "num_tokens": pa.array(np.ones(num_units, np.int32)),
                "plan_reason": pa.nulls(num_units, pa.string()),
            }
        )
        ones = np.ones(num_units, np.int64)
        columns = (numbers, numbers, ones, ones)
        units = pa.Table.from_arrays([pa.array(c) for c in columns], schema=UNIT_FIELDS)
        write_segment(objects, run_id=_RUN_ID, segment=0, prompts=prompts, units=units)
        half = num_units // 2 // UNITS_PER_FOLDER * UNITS_PER_FOLDER
        _commit_folders(objects, half)
        for unit in range(half, half + 1500):
            objects.put(commit_key(unit), [b"{}"])
        started = time.perf_counter()
        segments = read_segments(objects)
        table = read_unit_table(objects, segments)
        done = done_mask(find_committed(objects, _RUN_ID), len(table))
        missing = Schedule(table, done, max_attempts=3).num_missing
        seconds = time.perf_counter() - started
        assert missing == num_units - half - 1500
        return {"units": num_units, "missing": missing, "seconds": round(seconds, 2)}


def _commit_folders(objects: ObjectStore, num_units: int) -> None:
    """Write the snapshot of a run whose first units are all committed."""
    numbers, ones = np.arange(num_units), np.ones(num_units, np.int64)
    values = (numbers, 0 * ones, numbers, ones, ones, 0 * ones, 0 * ones, ones, 64 * ones)
    name = "00000000-0000abcd"
    prefix = f"{SNAPSHOTS}{name}/"
    none = {"unit": pa.int64(), "prompt": pa.int64(), "outcome": pa.string(), "reason": pa.string()}
    empty = pa.table({column: pa.array([], kind) for column, kind in none.items()})
    files = [
        write_parquet(
            objects, prefix, UNITS_FILE, pa.table(dict(zip(COLUMNS, values, strict=True)))
        ),
        write_parquet(objects, prefix, EXCEPTIONS_FILE, empty),
    ]
    manifest = SnapshotManifest(
        run_id=_RUN_ID,
        name=name,
        created="2026-01-01T00:00:00+00:00",
        units=num_units,
        complete_folders=num_units // UNITS_PER_FOLDER,
        files=files,
    )
    objects.create(prefix + MANIFEST, manifest.to_bytes())


def plan(num_prompts: int) -> dict[str, Any]:
    """Plan prompts for real; return the cost of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = _word_model(folder / "model")
        source = folder / "prompts.jsonl"
        with source.open("w") as stream:
            for number in range(num_prompts):
                text = " ".join(f"w{(number * 7 + i) % 1000}" for i in range(number % 60 + 4))
                stream.write(json.dumps({"id": f"prompt-{number}", "text": text}) + "\n")
        body = {"output": "x", "prompts": {"source": str(source)}, "model": str(model)}
        body["capture"] = {"unit_tokens": 65_536}
        memory: list[float] = []
        started, cpu = time.perf_counter(), time.process_time()
        manifest = write_plan(
            open_store(str(folder / "run")),
            parse_config(body),
            run_id=_RUN_ID,
            progress=lambda _done: memory.append(_resident_mb()),
        )
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {
        "prompts": manifest.num_prompts,
        "tokens": manifest.num_tokens,
        "microseconds_per_prompt": round(seconds / num_prompts * 1e6, 1),
        "cpu_microseconds_per_prompt": round(cpu / num_prompts * 1e6, 1),
        "resident_mb_after_each_file": memory[:: max(1, len(memory) // 12)],
    }


def _word_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGESIZE") / 1e6, 1)


_RUN_ID = "0" * 32
_LAYER = LayerSemantics(
    layer=0, module="m", num_heads=1, num_kv_heads=1, head_size=8, v_head_size=8, scale=1.0
)
_MODEL = ModelManifest(
    run_id="0" * 16, architecture="Fake", dtype="bfloat16", hidden_size=8, layers=[_LAYER]
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=200_000)
    options = parser.parse_args()
    half = np.arange(options.units) % 2 == 0
    results = {
        "whole run": simulate(options.units, options.workers, np.zeros(options.units, bool)),
        "rest of a half-done run": simulate(options.units, options.workers, half),
        "resume of a half-done run": resume(options.units),
        "planning": plan(options.prompts),
        "peak_resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // 10**6,
    }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    sys.exit(main())
