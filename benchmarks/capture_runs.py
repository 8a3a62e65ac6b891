"""What a capture benchmark runs: one engine, random prompts, with capture off, staged or committed.

Every measurement takes turns with the same engine with capture switched off, so that what else the
machine does hits both. It knows how to run, not what is compared or printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.check_run import check_run
from benchmarks.memory import MemoryWatch, sample, summary
from benchmarks.run_folder import RunFolder
from capture.engine import CaptureEngine
from capture.rows import UnitLayout
from capture.settings import (
    CaptureSettings,
    EngineSettings,
    PromptTask,
    StoreLocation,
    UnitResult,
    UnitTask,
)
from store.codec import Codec
from store.run_format import Site

_FIRST_WARM = 1 << 20
"""Units of this number and above only start the writers."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Tokens a second of runs that took turns: capture off, then on, again and again."""

    plain: tuple[float, ...]
    captured: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Return captured over plain, the best of each: the runs that were disturbed least."""
        return max(self.captured) / max(self.plain)

    @property
    def median_ratio(self) -> float:
        """Return the median of each pair's own ratio."""
        return float(np.median(np.divide(self.captured, self.plain)))


@dataclass(frozen=True, slots=True)
class CommittedRun:
    """The best of some committed runs. `phases` are seconds, except where a name says otherwise."""

    pairs: Pairs
    gigabytes_per_second: tuple[float, ...]
    """Stored, run by run."""
    writers: tuple[float, ...]
    """What the plain writers reached just before each run, GB/s."""
    phases: dict[str, float]
    timings: dict[str, float]


class Bench:
    """One engine, and prompts of random tokens to run through it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        engine = EngineSettings(
            model=options.model,
            dtype=options.dtype,
            tensor_parallel_size=options.tp,
            max_model_len=options.max_model_len,
            max_num_batched_tokens=options.step_tokens,
            max_num_seqs=options.max_num_seqs,
            gpu_memory_utilization=options.gpu_memory_utilization,
            load_format=options.load_format,
        )
        capture = CaptureSettings(
            sites=tuple(Site(site) for site in options.sites.split(",")),
            layers=numbers(options.layers) if options.layers else None,
            heads=numbers(options.heads) if options.heads else None,
            codec=Codec(options.codec),
            host_bytes=options.host_bytes,
            buffer_bytes=options.buffer_bytes,
            device_bytes=options.device_bytes,
            slot_bytes=options.slot_bytes,
            writer_threads=options.threads,
            writer_processes={"auto": None, "thread": False, "process": True}[options.writers],
        )
        self.capture_settings = capture
        started = time.perf_counter()
        scratch = Path(options.run_in[0] if options.run_in else "/tmp") / "attnstore-bench"
        location = StoreLocation(str(scratch))
        self.capture = CaptureEngine.start(engine, capture, location, "00" * 8)
        self.engine = self.capture.step_engine
        self.load_seconds = time.perf_counter() - started
        self.random = np.random.default_rng(0)
        vocabulary = self.engine.vllm_config.model_config.get_vocab_size()
        self.vocabulary = min(40_000, vocabulary)
        self._key = 1 << 20

    def prompts(self, length: int, count: int) -> list[np.ndarray]:
        return list(self.random.integers(10, self.vocabulary, (count, length), dtype=np.int32))

    def plain(self, length: int, count: int) -> float:
        """Return tokens/s of the engine with capture off, once."""
        self.engine.call("capture_switch", False)
        seconds = self._through(length, count, None)
        self.engine.call("capture_switch", True)
        return length * count / seconds

    def staged(self, length: int, count: int) -> Pairs:
        """Return tokens/s with every row copied to host slabs, dropped by the writers."""

        def captured() -> float:
            return length * count / self._through(length, count, self._discard)

        return self._taking_turns(length, count, captured)

    def _taking_turns(self, length: int, count: int, captured: Callable[[], float]) -> Pairs:
        turns = [(self.plain(length, count), captured()) for _ in range(self.options.repeats)]
        plain, rates = zip(*turns, strict=True)
        return Pairs(plain, rates)

    def _discard(self, lengths: list[int]) -> int:
        self._key += 1
        self.engine.call("capture_begin_unit", UnitLayout.plan(self._key, 0, "bench", lengths))
        self.engine.call("capture_fail_unit", self._key, "measured only")
        return self._key

    def _through(self, length: int, count: int, begin: Callable[[list[int]], int] | None) -> float:
        prompts = self.prompts(length, count)
        started = time.perf_counter()
        key = begin([length] * count) if begin else 0
        for place, ids in enumerate(prompts):
            self.engine.add(key, place, ids)
        while self.engine.busy:
            self.engine.step()
        if begin:
            self.engine.call("capture_seal_unit", key)
            waiting = self.options.tp
            while waiting:
                waiting -= sum(len(reports) for reports in self.engine.call("capture_poll"))
                time.sleep(0.0005)
        return time.perf_counter() - started

    def end_to_end(
        self, length: int, count: int, folder: str, writers: Callable[[], float]
    ) -> CommittedRun:
        """Run `--repeats` committed runs of `count` prompts; phases are those of the best.

        `writers` returns what plain writers reach, and is run before each of them.
        """
        runs: list[tuple[float, float, dict[str, float], dict[str, float]]] = []
        written: list[float] = []

        def captured() -> float:
            written.append(writers())
            runs.append(self._committed_run(length, count, folder))
            return runs[-1][0]

        pairs = self._taking_turns(length, count, captured)
        _, _, phases, timings = max(runs, key=lambda run: run[0])
        speeds = tuple(speed for _, speed, _, _ in runs)
        return CommittedRun(pairs, speeds, tuple(written), phases, timings)

    def _committed_run(
        self, length: int, count: int, folder: str
    ) -> tuple[float, float, dict[str, float], dict[str, float]]:
        """Return tokens/s, stored GB/s, phases and timings of one run."""
        tasks = list(self._units(self.prompts(length, count)))
        with self._run_folder(folder) as watched:
            started = time.perf_counter()
            before = self.engine.call("capture_timings")[0]
            stored, timings = 0, dict.fromkeys(before, 0.0)
            computed = started
            for results, ran_out in self._steps(tasks):
                if ran_out:
                    # The last time this happens the engine has no more work.
                    computed = time.perf_counter()
                for result in results:
                    stored += result.bytes
                    watched.committed(result.unit, result.bytes)
                    for stage, seconds in result.timings.items():
                        timings[stage] = timings.get(stage, 0.0) + seconds
            ended = time.perf_counter()
            if self.options.verify:
                check_run(watched.folder, self.capture.facts, tasks)
        after = self.engine.call("capture_timings")[0]
        timings |= {name: after[name] - before[name] for name in after}
        begun = min(watched.first_write or computed, computed)
        phases = {
            "ramp": begun - started,
            "steady": computed - begun,
            "drain": ended - computed,
            "deleted_gb": watched.deleted_bytes / 1e9,
            "waited_for_deletion": watched.waited_seconds,
        }
        seconds = ended - started
        return length * count / seconds, stored / seconds / 1e9, phases, timings

    def soak(self, seconds: float, length: int, folder: str) -> dict[str, Any]:
        """Run units into `folder` for so long, and return what memory did meanwhile."""
        ranks = self.engine.call("capture_facts")
        slabs = sum(rank.host_bytes for rank in ranks)
        budget = slabs + len(ranks) * self.capture_settings.buffer_bytes
        before = sample(os.getpid(), 0.0, device_bytes())
        ends = time.monotonic() + seconds
        per_unit = max(1, self.options.unit_tokens // length)

        def prompts() -> Iterator[np.ndarray]:
            while time.monotonic() < ends:
                yield from self.prompts(length, per_unit)

        units = stored = 0
        with self._run_folder(folder) as watched:
            watch = MemoryWatch(device_bytes)
            for results, _ in self._steps(self._units(prompts())):
                for result in results:
                    units, stored = units + 1, stored + result.bytes
                    watched.committed(result.unit, result.bytes)
            samples = watch.stop()
        return {
            "units": units,
            "stored_bytes": stored,
            "slab_bytes": slabs,
            "ring_bytes": sum(rank.device_bytes for rank in ranks),
            **summary(samples, before, budget),
        }

    @contextmanager
    def _run_folder(self, folder: str) -> Iterator[RunFolder]:
        run = Path(folder) / f"attnstore-bench-{os.getpid()}"
        shutil.rmtree(run, ignore_errors=True)
        self.capture.reopen(StoreLocation(str(run)))
        self._start_writers()
        for part in run.iterdir():
            shutil.rmtree(part)
        watched = RunFolder(run, self.options.keep_bytes)
        try:
            yield watched
        finally:
            watched.close()

    def _start_writers(self) -> None:
        """Send a unit of one prompt through every writer: they start with the engine, once."""
        prompts = self.prompts(16, self.options.threads)
        for _ in self._steps(
            UnitTask(_FIRST_WARM + number, "started", 0, (PromptTask(ids),))
            for number, ids in enumerate(prompts)
        ):
            pass

    def _units(self, prompts: Iterable[np.ndarray]) -> Iterator[UnitTask]:
        per_unit = None
        unit = first = 0
        chosen: list[PromptTask] = []
        for ids in prompts:
            per_unit = per_unit or max(1, self.options.unit_tokens // len(ids))
            chosen.append(PromptTask(ids))
            if len(chosen) == per_unit:
                yield UnitTask(unit, "bench", first, tuple(chosen))
                unit, first, chosen = unit + 1, first + per_unit, []
        if chosen:
            yield UnitTask(unit, "bench", first, tuple(chosen))

    def _steps(self, tasks: Iterable[UnitTask]) -> Iterator[tuple[list[UnitResult], bool]]:
        """Yield what each step brings and whether it was the last of the engine's work by now."""
        waiting = iter(tasks)
        more = True
        while more or self.capture.in_flight:
            while more and self.capture.in_flight < self.options.units_in_flight:
                task = next(waiting, None)
                more = task is not None
                if task is not None:
                    self.capture.admit(task)
            was_busy = self.engine.busy
            results = self.capture.advance()
            for result in results:
                if result.error is not None:
                    raise SystemExit(result.error)
            yield results, was_busy and not self.engine.busy


def device_bytes() -> int:
    """Return what torch holds of the GPU in this process, 0 without one."""
    import torch

    return int(torch.cuda.memory_reserved()) if torch.cuda.is_initialized() else 0


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `32,64`."""
    return tuple(int(part) for part in text.split(","))
