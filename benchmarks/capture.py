"""Capture against plain vLLM in one process: tokens a second with and without, and their ratio.

    python benchmarks/capture.py MODEL [--tp 2] [--lengths 32,64,512] [--run-in DIR] [--json OUT]

Each measurement is set against the same engine with capture switched off; best of `--repeats`.

staged      every wanted row of every layer reaches host memory and is dropped there
end to end  prompts go in as units and come out as committed units of a run under DIR; `phases`
            tells the time until writing began (ramp), how fast files grew from then until the
            engine was done (steady), and the time from there to the last commit (drain)
writers     the same number of plain threads write files of 64 MiB with fsync under DIR

MODEL is a checkpoint folder; with `--load-format dummy` its config and a tokenizer are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"

from benchmarks.run_folder import RunFolder  # noqa: E402
from capture.engine import CaptureEngine  # noqa: E402
from capture.rows import UnitLayout  # noqa: E402
from capture.settings import (  # noqa: E402
    CaptureSettings,
    EngineSettings,
    PromptTask,
    StoreLocation,
    UnitTask,
)
from store.codec import Codec  # noqa: E402
from store.run_format import Site  # noqa: E402

FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of the result. `ratio` is over the plain engine of the same process and length."""

    what: str
    prompt_tokens: int
    prompts: int
    tokens_per_second: float
    plain_tokens_per_second: float
    gigabytes_per_second: float = 0.0
    where: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    """End to end only: seconds, except where a name says otherwise."""

    @property
    def ratio(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second

    def line(self) -> str:
        shown = f"{self.what:<11} {self.where:<16} {self.prompt_tokens:>6} tokens a prompt: "
        shown += f"{self.tokens_per_second:>9,.0f} tok/s, ratio {self.ratio:.3f}"
        if self.gigabytes_per_second:
            shown += f", {self.gigabytes_per_second:.2f} GB/s"
        for figures in (self.phases, self.timings):
            shown += f"\n            {_rounded(figures)}" if figures else ""
        return shown


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """One committed run. `phases` and `timings` as in `Measurement`."""

    tokens_per_second: float
    gigabytes_per_second: float
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
            layers=_numbers(options.layers) if options.layers else None,
            codec=Codec(options.codec),
            host_bytes=options.host_bytes,
            device_bytes=options.device_bytes,
            slot_bytes=options.slot_bytes,
            writer_threads=options.threads,
            writer_processes={"auto": None, "thread": False, "process": True}[options.writers],
        )
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
        """Return tokens/s of the engine with capture off."""
        self.engine.call("capture_switch", False)
        seconds = min(self._through(length, count, None) for _ in range(self.options.repeats))
        self.engine.call("capture_switch", True)
        return length * count / seconds

    def staged(self, length: int, count: int) -> float:
        """Return tokens/s with every row copied to host slabs, dropped by the writer threads."""
        repeats = range(self.options.repeats)
        return length * count / min(self._through(length, count, self._discard) for _ in repeats)

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

    def end_to_end(self, length: int, count: int, folder: str) -> EndToEnd:
        """Return the best of `--repeats` committed runs of `count` prompts."""
        runs = [self._committed_run(length, count, folder) for _ in range(self.options.repeats)]
        return max(runs, key=lambda run: run.tokens_per_second)

    def _committed_run(self, length: int, count: int, folder: str) -> EndToEnd:
        run = Path(folder) / f"attnstore-bench-{os.getpid()}"
        shutil.rmtree(run, ignore_errors=True)
        self.capture.reopen(StoreLocation(str(run)))
        tasks = self._units(length, count)
        self._start_writers(len(tasks))
        for part in run.iterdir():
            shutil.rmtree(part)
        watched = RunFolder(run, self.options.keep_bytes)
        try:
            started = time.perf_counter()
            stored, computed, written, timings = self._run(tasks, watched)
            ended = time.perf_counter()
        finally:
            watched.close()
        begun = min(watched.first_write or computed, computed)
        phases = {
            "ramp": begun - started,
            "steady": computed - begun,
            "steady_gb_per_s": written / max(computed - begun, 1e-9) / 1e9,
            "drain": ended - computed,
            "deleted_gb": watched.deleted_bytes / 1e9,
            "waited_for_deletion": watched.waited_seconds,
        }
        seconds = ended - started
        return EndToEnd(length * count / seconds, stored / seconds / 1e9, phases, timings)

    def _start_writers(self, unit: int) -> None:
        """Send a unit of one prompt through every writer: they start with the engine, once."""
        ids = self.prompts(16, self.options.threads)
        for number, prompt in enumerate(ids):
            self.capture.admit(UnitTask(unit + number, "started", 0, (PromptTask(prompt),)))
        while self.capture.in_flight:
            for result in self.capture.advance():
                if result.error is not None:
                    raise SystemExit(result.error)

    def _units(self, length: int, count: int) -> list[UnitTask]:
        per_unit = max(1, self.options.unit_tokens // length)
        prompts = self.prompts(length, count)
        tasks = []
        for unit, first in enumerate(range(0, count, per_unit)):
            chosen = tuple(PromptTask(ids) for ids in prompts[first : first + per_unit])
            tasks.append(UnitTask(unit, "bench", first, chosen))
        return tasks

    def _run(
        self, tasks: list[UnitTask], watched: RunFolder
    ) -> tuple[int, float, int, dict[str, float]]:
        """Return bytes stored, when the last forward pass ended, bytes written by then, timings."""
        waiting, stored = list(reversed(tasks)), 0
        before = self.engine.call("capture_timings")[0]
        timings: dict[str, float] = {}
        computed, written = time.perf_counter(), 0
        while waiting or self.capture.in_flight:
            while waiting and self.capture.in_flight < self.options.units_in_flight:
                self.capture.admit(waiting.pop())
            was_busy = self.engine.busy
            results = self.capture.advance()
            if was_busy and not self.engine.busy and not waiting:
                computed, written = time.perf_counter(), watched.written_bytes()
            for result in results:
                if result.error is not None:
                    raise SystemExit(result.error)
                stored += result.bytes
                watched.committed(result.unit, result.bytes)
                for stage, seconds in result.timings.items():
                    timings[stage] = timings.get(stage, 0.0) + seconds
        after = self.engine.call("capture_timings")[0]
        timings |= {name: after[name] - before[name] for name in after}
        return stored, computed, written, timings


def plain_writers(folder: str, threads: int, total_bytes: int, kept_bytes: int) -> float:
    """Return GB/s of `threads` threads that write 64 MiB files with fsync, nothing else."""
    data = np.random.default_rng(0).integers(0, 255, FILE_BYTES, dtype=np.uint8).tobytes()
    target = Path(folder) / f"attnstore-writers-{os.getpid()}"
    target.mkdir(parents=True, exist_ok=True)
    files = max(threads, total_bytes // FILE_BYTES)
    kept = max(1, kept_bytes // FILE_BYTES // threads)

    def write(number: int) -> None:
        for index in range(number, files, threads):
            path = target / f"{number}-{(index // threads) % kept}"
            path.unlink(missing_ok=True)
            with path.open("wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())

    workers = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    shutil.rmtree(target, ignore_errors=True)
    return files * FILE_BYTES / seconds / 1e9


def main() -> None:
    options = _options()
    bench = Bench(options)
    facts = bench.capture.facts
    print(
        f"loaded in {bench.load_seconds:.0f} s, {facts.bytes_per_token} bytes a token", flush=True
    )
    bench.plain(64, 8)
    bench.staged(64, 8)
    measured: list[Measurement] = []

    def add(measurement: Measurement) -> None:
        measured.append(measurement)
        print(measurement.line(), flush=True)

    for length in _numbers(options.lengths) if options.lengths else ():
        count = max(1, options.tokens // length)
        plain = bench.plain(length, count)
        add(Measurement("plain", length, count, plain, plain))
        rate = bench.staged(length, count)
        add(Measurement("staged", length, count, rate, plain, rate * facts.bytes_per_token / 1e9))
    writers: dict[str, float] = {}
    for folder in options.run_in:
        length = options.run_length
        count = max(1, options.run_tokens // length)
        plain = bench.plain(length, count)
        volume = count * length * facts.bytes_per_token
        written = min(volume, options.writers_bytes)
        kept = min(volume, options.keep_bytes or volume)
        # The best of several: a machine's memory may have to grow at the first.
        writers[folder] = max(
            plain_writers(folder, options.threads * options.tp, written, kept)
            for _ in range(options.repeats)
        )
        print(f"writers     {folder:<16} {writers[folder]:.2f} GB/s", flush=True)
        run = bench.end_to_end(length, count, folder)
        rate, speed = run.tokens_per_second, run.gigabytes_per_second
        add(
            Measurement(
                "end to end", length, count, rate, plain, speed, folder, run.timings, run.phases
            )
        )
        print(f"            over plain writers: {speed / writers[folder]:.3f}", flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"largest resident memory {memory / 1e9:.2f} GB", flush=True)
    if options.json:
        report = {
            "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "gpu": _gpu()},
            "versions": facts.model.versions,
            "options": {k: v for k, v in vars(options).items() if k != "json"},
            "bytes_per_token": facts.bytes_per_token,
            "measurements": [{**asdict(m), "ratio": m.ratio} for m in measured],
            "plain_writers_gb_per_s": writers,
            "max_rss_bytes": memory,
        }
        Path(options.json).write_text(json.dumps(report, indent=1))
    bench.capture.shutdown()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("model")
    add("--tp", type=int, default=1)
    add("--dtype", default="float32")
    add("--load-format", default="auto")
    add("--lengths", default="32,64,512,2048")
    add("--tokens", type=int, default=8192, help="tokens of each measurement")
    add("--sites", default="rot_q,rot_k,v,z")
    add("--layers", default="")
    add("--codec", default="raw")
    add("--run-in", action="append", default=[], help="folder for end to end; may be repeated")
    add("--run-length", type=int, default=512)
    add("--run-tokens", type=int, default=16_384)
    add(
        "--keep-bytes",
        type=int,
        help="delete committed units beyond so much while a run goes on; it, what is in flight and "
        "as much again may lie there",
    )
    add("--unit-tokens", type=int, default=4096)
    add("--units-in-flight", type=int, default=2)
    add("--step-tokens", type=int, default=2048)
    add("--max-num-seqs", type=int, default=512)
    add("--max-model-len", type=int, default=4096)
    add("--gpu-memory-utilization", type=float, default=0.6)
    add("--host-bytes", type=int, default=2 << 30)
    add("--device-bytes", type=int, default=4 << 30)
    add("--slot-bytes", type=int, default=64 << 20)
    add("--threads", type=int, default=2, help="writer threads of each rank")
    add("--writers-bytes", type=int, default=64 << 30, help="most that the plain writers write")
    add("--writers", choices=("auto", "thread", "process"), default="auto")
    add("--repeats", type=int, default=3)
    add("--json", default="")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _rounded(timings: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds, 2) for name, seconds in timings.items()}


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
