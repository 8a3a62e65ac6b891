"""Processes that race for units and are killed at any moment never leave a wrong or torn unit.

ATTNSTORE_SOAK_SECONDS says how long each back end is soaked (`make soak`: ten minutes, and what was
seen goes to docs/soak.md).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count

import pytest

from store.commit import committed_units, read_commit
from store.gc import collect_garbage
from store.objects.open import open_store
from store.objects.protocol import ObjectStore
from store.snapshot import find_committed, write_snapshot
from store.verify import verify_run
from tests.store.committed_values import assert_same_values, committed_values
from tests.store.sample_run import RUN_ID, write_manifests
from tests.store.soak_worker import LENGTHS, SHAPE, values_of

SECONDS = float(os.environ.get("ATTNSTORE_SOAK_SECONDS", "5"))
WORKERS = 3
ROUND_UNITS = {"local": (400, 2500), "seaweedfs": (150, 1200)}
"""Units of a round: in a soak of seconds, and of minutes, where a run has several folders."""
SHORT_SECONDS = 60.0
KILLS = 3
"""However short the soak or slow the machine, so many workers at least are killed at work."""
FINISH_SECONDS = 600.0


@dataclass
class Seen:
    """What a soak did, over all its rounds."""

    rounds: int = 0
    units: int = 0
    kills: int = 0
    snapshots: int = 0
    collections: int = 0
    objects: int = 0
    bytes: int = 0


@pytest.mark.timeout(SECONDS + 3 * FINISH_SECONDS)
@pytest.mark.parametrize("kind", ["local", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def test_kills_and_races(tmp_path, kind, request, record_property):
    units = ROUND_UNITS[kind][SECONDS > SHORT_SECONDS]
    chance, seeds, seen = random.Random(1), count(1), Seen()
    began = time.monotonic()
    while seen.kills < KILLS or time.monotonic() < began + SECONDS:
        if kind == "local":
            url, options = str(tmp_path / f"run-{seen.rounds}"), {}
        else:
            server = request.getfixturevalue("seaweedfs_server")
            url, options = server.url(f"soak-{os.getpid()}-{seen.rounds}"), server.options
        objects = open_store(url, options)
        write_manifests(objects, SHAPE, [LENGTHS] * units)
        command = [sys.executable, "-m", "tests.store.soak_worker", url, json.dumps(options)]
        strike(objects, [*command, str(units)], units, began + SECONDS, chance, seeds, seen)
        check(objects, units, seen)
    for name, value in {**asdict(seen), "seconds": round(time.monotonic() - began)}.items():
        record_property(name, value)


def strike(
    objects: ObjectStore, command: list[str], units: int, deadline: float, chance: random.Random,
    seeds: Iterator[int], seen: Seen,
) -> None:  # fmt: skip
    """Let workers race for all units, and kill them until the deadline; return when all is done."""

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, str(next(seeds))], stdout=subprocess.DEVNULL)

    workers = [start() for _ in range(WORKERS)]
    try:
        while len(committed_units(objects)) < units and (
            time.monotonic() < deadline or seen.kills < KILLS
        ):
            time.sleep(chance.uniform(0.2, 1.2))
            victim = chance.randrange(WORKERS)
            seen.kills += workers[victim].poll() is None
            workers[victim].kill()
            workers[victim].wait(10)
            workers[victim] = start()
            if chance.random() < 0.3:
                write_snapshot(objects, RUN_ID)
                seen.snapshots += 1
            if chance.random() < 0.3:
                collect_garbage(objects, delete=True)
                seen.collections += 1
        for worker in workers:
            assert worker.wait(FINISH_SECONDS) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)


def check(objects: ObjectStore, units: int, seen: Seen) -> None:
    """Every unit is there once, with the values of the attempt that its commit names."""
    committed = committed_units(objects)
    assert list(committed) == list(range(units))
    assert find_committed(objects, RUN_ID).units().tolist() == list(range(units))
    for unit, key in committed.items():
        attempt = read_commit(objects, key).attempt
        assert_same_values(committed_values(objects, key), values_of(unit, attempt))
    collect_garbage(objects, delete=True)
    report = verify_run(objects, deep=True)
    assert report.problems == []
    attempts = {info.name.split("/")[2] for info in objects.list("data/")}
    assert attempts == {read_commit(objects, key).attempt for key in committed.values()}
    seen.rounds += 1
    seen.units += units
    seen.objects += report.objects
    seen.bytes += report.bytes
