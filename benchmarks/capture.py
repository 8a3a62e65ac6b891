"""Capture against plain vLLM in one process: tokens a second with and without, and their ratio.

    python benchmarks/capture.py MODEL [--tp 2] [--lengths 32,64,512] [--run-in DIR] [--json OUT]

Plain and captured runs take turns, `--repeats` of each; rates are the best of each, `ratio` theirs,
`median_ratio` the median of the pairs' own.

staged      every wanted row of every layer reaches host memory and is dropped there
end to end  prompts go in as units and come out as committed units of a run under DIR; `phases`
            tells the time until writing began (ramp), from then until the engine was done (steady),
            and from there to the last commit (drain)
writers     before each committed run the same number of plain threads write files of 64 MiB with
            fsync under DIR, all the same number of files
memory      with --soak-seconds: units run for so long under the first DIR, and what this process
            and its children hold is sampled each second

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
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"

from benchmarks.capture_runs import Bench, Pairs, numbers  # noqa: E402
from benchmarks.run_folder import settle  # noqa: E402

FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of the result: runs with capture beside runs without, by turns."""

    what: str
    prompt_tokens: int
    prompts: int
    pairs: Pairs
    gigabytes_per_second: float
    where: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    """End to end only: seconds, except where a name says otherwise."""

    def as_json(self) -> dict[str, object]:
        """Return every figure, the pairs themselves included."""
        return {
            **asdict(self),
            "tokens_per_second": max(self.pairs.captured),
            "plain_tokens_per_second": max(self.pairs.plain),
            "ratio": self.pairs.ratio,
            "median_ratio": self.pairs.median_ratio,
        }

    def line(self) -> str:
        pairs = self.pairs
        shown = f"{self.what:<11} {self.where:<16} {self.prompt_tokens:>6} tokens a prompt: "
        shown += f"{max(pairs.captured):>9,.0f} tok/s of {max(pairs.plain):,.0f} plain, "
        shown += f"ratio {pairs.ratio:.3f} (median of pairs {pairs.median_ratio:.3f}), "
        shown += f"{self.gigabytes_per_second:.2f} GB/s"
        for figures in (self.phases, self.timings):
            shown += f"\n            {_rounded(figures)}" if figures else ""
        return shown


def plain_writers(folder: str, threads: int, total_bytes: int, kept_bytes: int) -> float:
    """Return GB/s of `threads` threads that write 64 MiB files with fsync, nothing else."""
    data = np.random.default_rng(0).integers(0, 255, FILE_BYTES, dtype=np.uint8).tobytes()
    target = Path(folder) / f"attnstore-writers-{os.getpid()}"
    target.mkdir(parents=True, exist_ok=True)
    files = threads * max(1, total_bytes // FILE_BYTES // threads)
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
    settle()
    return files * FILE_BYTES / seconds / 1e9


def main() -> None:
    options = _options()
    bench = Bench(options)
    try:
        _measure(bench, options)
    finally:
        # Else an error would leave writer processes that the interpreter waits for.
        bench.capture.shutdown()


def _measure(bench: Bench, options: argparse.Namespace) -> None:
    facts = bench.capture.facts
    row_bytes = facts.bytes_per_token
    print(f"loaded in {bench.load_seconds:.0f} s, {row_bytes} bytes a token", flush=True)
    bench.plain(64, 8)
    bench.staged(64, 8)
    measured: list[Measurement] = []

    def add(measurement: Measurement) -> None:
        measured.append(measurement)
        print(measurement.line(), flush=True)

    for length in numbers(options.lengths) if options.lengths else ():
        count = max(1, options.tokens // length)
        pairs = bench.staged(length, count)
        add(Measurement("staged", length, count, pairs, max(pairs.captured) * row_bytes / 1e9))
    committed: dict[str, tuple[float, ...]] = {}
    writers: dict[str, tuple[float, ...]] = {}
    length = options.run_length
    for folder in options.run_in:
        count = max(1, options.run_tokens // length)
        volume = count * length * row_bytes
        written = min(volume, options.writers_bytes)
        kept = min(volume, options.keep_bytes or volume)
        write = partial(plain_writers, folder, options.threads * options.tp, written, kept)
        # A machine's memory may have to grow at the first.
        write()
        run = bench.end_to_end(length, count, folder, write)
        speed = max(run.gigabytes_per_second)
        committed[folder], writers[folder] = run.gigabytes_per_second, run.writers
        add(
            Measurement(
                "end to end", length, count, run.pairs, speed, folder, run.timings, run.phases
            )
        )
        of_each = np.divide(run.gigabytes_per_second, run.writers)
        print(
            f"            GB/s {_listed(run.gigabytes_per_second)}, plain writers before each "
            f"{_listed(run.writers)}: best over best {speed / max(run.writers):.3f}, median of "
            f"pairs {np.median(of_each):.3f}",
            flush=True,
        )
    memory = None
    if options.soak_seconds:
        memory = bench.soak(options.soak_seconds, length, options.run_in[0])
        _print_memory(memory)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"largest resident memory {largest / 1e9:.2f} GB", flush=True)
    if options.json:
        report = {
            "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "gpu": _gpu()},
            "versions": facts.model.versions,
            "options": {k: v for k, v in vars(options).items() if k != "json"},
            "bytes_per_token": row_bytes,
            "measurements": [one.as_json() for one in measured],
            "committed_gb_per_s": committed,
            "plain_writers_gb_per_s": writers,
            "memory": memory,
            "max_rss_bytes": largest,
        }
        Path(options.json).write_text(json.dumps(report, indent=1))


def _print_memory(memory: dict[str, Any]) -> None:
    print(
        f"memory      {memory['units']} units, {memory['stored_bytes'] / 1e9:.1f} GB stored in "
        f"{memory['seconds']:.0f} s; slabs {memory['slab_bytes'] / 1e9:.2f} GB"
    )
    for name in ("pss", "anonymous", "shared_memory", "device"):
        first, last = memory["first_minute"][name], memory["last_minute"][name]
        print(
            f"            {name:<14} before {memory['before'][name] / 1e6:>8,.0f} MB, first minute "
            f"{first / 1e6:>8,.0f}, last {last / 1e6:>8,.0f} ({(last - first) / 1e6:+,.1f})"
        )
    print(
        f"            most above before {memory['most_above_before'] / 1e6:,.0f} MB of a budget of "
        f"{memory['budget'] / 1e6:,.0f}",
        flush=True,
    )


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
    add("--heads", default="")
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
    add("--buffer-bytes", type=int, default=32 << 30)
    add("--device-bytes", type=int, default=4 << 30)
    add("--slot-bytes", type=int, default=64 << 20)
    add("--threads", type=int, default=2, help="writer threads of each rank")
    add("--writers-bytes", type=int, default=64 << 30, help="most that the plain writers write")
    add("--writers", choices=("auto", "thread", "process"), default="auto")
    add("--repeats", type=int, default=3)
    add("--json", default="")
    add("--soak-seconds", type=float, default=0.0)
    add(
        "--verify", action="store_true", help="read back every committed run; needs no --keep-bytes"
    )
    options = parser.parse_args()
    if options.soak_seconds and not options.run_in:
        parser.error("--soak-seconds needs a --run-in")
    if options.verify and options.keep_bytes is not None:
        parser.error("--verify needs all of a run; leave --keep-bytes out")
    return options


def _listed(rates: tuple[float, ...]) -> str:
    return ", ".join(f"{rate:.2f}" for rate in rates)


def _rounded(timings: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds, 2) for name, seconds in timings.items()}


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
