"""Run examples/sweep.yaml and strike a process of it at random, five times; then check everything.

    python examples/kill_sweep.py [--kills 5] [--seed 0] [--minutes 10] [--report docs/sweeps.md]

Strikes: SIGKILL of a worker, of a tensor-parallel rank, or of the driver itself (which is then
simply started again); a soak (`--minutes`) repeats the sweep and also stops a rank for good
(SIGSTOP), ends the driver with SIGTERM, and starts a second driver beside it. At the end of each
sweep every prompt must be stored once, every byte must match its checksum, and z must be what the
stored pattern and v say it is. `--report` puts what was said into a document.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil

from capture.checkpoints.tiny import tiny_qwen3
from store import open_run
from store.objects.open import open_store
from store.verify import verify_run

CONFIG = "examples/sweep.yaml"
OUTPUT = Path("sweep-run")
PROMPTS = Path(".cache/sweep")
MODEL = Path(".cache/models/tiny-qwen3")
WORDS = "the heads of a layer look back at what came before and choose what to carry"
KILLS = ("kill a worker", "kill a rank", "kill a driver")
SOAK = (*KILLS, "hang a rank", "terminate a driver", "second driver")
COMMAND = [sys.executable, "-m", "jobs.cli", "run", CONFIG]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path.cwd())}
ENDINGS = ("kill a driver", "terminate a driver")
AGAIN = (75, -signal.SIGKILL)
SAID: list[str] = []


def say(text: str) -> None:
    SAID.append(f"== {text}")
    print(SAID[-1], flush=True)


def prepare(num_prompts: int) -> None:
    """Make the model and gzipped prompt files, and remove what an earlier sweep left."""
    tiny_qwen3(MODEL)
    shutil.rmtree(OUTPUT, ignore_errors=True)
    shutil.rmtree(PROMPTS, ignore_errors=True)
    PROMPTS.mkdir(parents=True)
    words = WORDS.split()
    chosen = random.Random(1)
    for part in range(4):
        with gzip.open(PROMPTS / f"prompts-{part}.jsonl.gz", "wt") as stream:
            for number in range(num_prompts // 4):
                text = " ".join(chosen.choices(words, k=chosen.randint(3, 60)))
                record = {"id": f"sweep-{part}-{number}", "text": text, "part": part}
                stream.write(json.dumps(record) + "\n")


def committed() -> int:
    return sum(1 for _ in OUTPUT.glob("commits/*/*.json"))


def victims(driver: int) -> dict[str, list[int]]:
    """Process ids by kind: workers are Ray actors, ranks are their engines' children."""
    found: dict[str, list[int]] = {"driver": [driver], "worker": [], "rank": []}
    for process in psutil.Process(driver).children(recursive=True):
        try:
            name = " ".join(process.cmdline())
            if "ray::CaptureWorker" in name:
                found["worker"].append(process.pid)
                found["rank"] += [
                    child.pid
                    for child in process.children()
                    if "spawn_main" in " ".join(child.cmdline()) or "VLLM" in child.name()
                ]
        except psutil.NoSuchProcess:
            continue
    return found


def strike(kind: str, driver: int, chosen: random.Random) -> bool:
    """Do it; return whether there was anybody to do it to."""
    if kind == "second driver":
        second = subprocess.run(COMMAND, env=ENVIRONMENT, check=False)
        if second.returncode not in (0, 75):
            sys.exit(f"a second driver ended with {second.returncode}")
        return True
    verb, _, victim = kind.split()
    pids = victims(driver)[victim]
    if not pids:
        return False
    signals = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "terminate": signal.SIGTERM}
    os.kill(chosen.choice(pids), signals[verb])
    return True


def sweep(kills: int, seed: int, kinds: tuple[str, ...]) -> Counter[str]:
    """Run the sweep to its end, striking as it goes; return how it was struck."""
    chosen = random.Random(seed)
    struck: Counter[str] = Counter()
    while True:
        driver = subprocess.Popen(COMMAND, env=ENVIRONMENT)
        since = committed()
        while driver.poll() is None:
            time.sleep(0.2)
            # Strike once the run has got on a little, so that it meets work in flight.
            if sum(struck.values()) < kills and committed() >= since + chosen.randint(2, 4):
                kind = chosen.choice(kinds)
                say(f"{kind}, with {committed()} units committed")
                struck[kind] += strike(kind, driver.pid, chosen)
                if kind in ENDINGS:
                    # One that drains may be done any time; a second driver would take the rest.
                    driver.wait()
                since = committed()
        if driver.returncode not in AGAIN:
            if driver.returncode:
                sys.exit(f"the sweep ended with {driver.returncode}")
            return struck
        say(f"the driver ended with {driver.returncode}: running again")


def check(num_prompts: int) -> None:
    report = verify_run(open_store(str(OUTPUT)), deep=True)
    if not report.ok:
        sys.exit(f"damaged: {report.problems[:5]}")
    run = open_run(str(OUTPUT))
    statuses = Counter(run.prompts["status"].to_pylist())
    ids = run.prompts["prompt_id"].to_pylist()
    if statuses != {"stored": num_prompts} or len(set(ids)) != num_prompts:
        sys.exit(f"not every prompt is stored once: {statuses}")
    for prompt in random.Random(2).sample(ids, 20):
        pattern = run.pattern(prompt=prompt, layer=1, head=5).values
        v = run.read("v", prompt=prompt, layer=1, head=1).values
        z = run.read("z", prompt=prompt, layer=1, head=5).values
        np.testing.assert_allclose(z, pattern @ v, atol=1e-4)
    say(f"{num_prompts} prompts stored once, {report.objects} objects checked byte by byte")


def write_report(path: Path, title: str) -> None:
    """Put what was said under its heading, whatever stood there before; makes a missing file."""
    section = f"## {title}\n\n```\n" + "\n".join(SAID) + "\n```\n"
    text = path.read_text() if path.exists() else "# What the sweeps last said\n\n"
    before, *rest = text.split(f"## {title}\n")
    after = rest[0].partition("\n## ") if rest else ("", "", "")
    path.write_text(before + section + (f"\n## {after[2]}" if after[1] else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=1600)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    struck: Counter[str] = Counter()
    sweeps = 0
    while not sweeps or time.monotonic() - started < 60 * options.minutes:
        prepare(options.prompts)
        kinds = SOAK if options.minutes else KILLS
        met = sweep(options.kills, options.seed + sweeps, kinds)
        check(options.prompts)
        if sum(met.values()) < options.kills:
            sys.exit(f"only {sum(met.values())} strikes met a running sweep")
        struck += met
        sweeps += 1
    seconds = time.monotonic() - started
    how = ", ".join(f"{kind}: {count}" for kind, count in sorted(struck.items()))
    many = f"{sweeps} sweeps" if sweeps > 1 else "1 sweep"
    say(f"{many} in {seconds:.0f} s ({how}): complete and bit-checked")
    if options.report is not None:
        write_report(options.report, "make sweeps" if options.minutes else "make sweep")


if __name__ == "__main__":
    main()
