"""Processes that race for units and are killed at any moment never leave a wrong or torn unit.

ATTNSTORE_SOAK_SECONDS says how long each back end is soaked (`make soak`: ten minutes).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time

import pytest

from store.commit import committed_units, read_commit
from store.gc import collect_garbage
from store.objects.open import open_store
from store.snapshot import find_committed, write_snapshot
from store.verify import verify_run
from tests.store.committed_values import assert_same_values, committed_values
from tests.store.sample_run import RUN_ID, write_manifests
from tests.store.soak_worker import LENGTHS, SHAPE, values_of

SECONDS = float(os.environ.get("ATTNSTORE_SOAK_SECONDS", "8"))
WORKERS = 3
UNITS_PER_SECOND = 80
FINISH_SECONDS = 120 + 4 * SECONDS


@pytest.mark.timeout(SECONDS + FINISH_SECONDS + 120)
@pytest.mark.parametrize("kind", ["local", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def test_kills_and_races(tmp_path, kind, request):
    if kind == "local":
        url, options = str(tmp_path / "run"), {}
    else:
        server = request.getfixturevalue("seaweedfs_server")
        url, options = server.url(f"soak-{os.getpid()}"), server.options
    objects = open_store(url, options)
    units = int(SECONDS * UNITS_PER_SECOND)
    write_manifests(objects, SHAPE, [LENGTHS] * units)
    chance = random.Random(1)
    seeds = iter(range(1, 1 << 30))

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.store.soak_worker", url, json.dumps(options)]
        return subprocess.Popen([*command, str(units), str(next(seeds))], stdout=subprocess.DEVNULL)

    workers = [start() for _ in range(WORKERS)]
    kills = 0
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline and len(committed_units(objects)) < units:
            time.sleep(chance.uniform(0.2, 1.2))
            victim = chance.randrange(WORKERS)
            kills += workers[victim].poll() is None
            workers[victim].kill()
            workers[victim].wait(10)
            workers[victim] = start()
            if chance.random() < 0.3:
                write_snapshot(objects, RUN_ID)
            if chance.random() < 0.3:
                collect_garbage(objects, delete=True)
        assert kills >= 3
        for worker in workers:
            assert worker.wait(FINISH_SECONDS) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)

    committed = committed_units(objects)
    assert list(committed) == list(range(units))
    assert find_committed(objects, RUN_ID).units().tolist() == list(range(units))
    for unit, key in committed.items():
        attempt = read_commit(objects, key).attempt
        assert_same_values(committed_values(objects, key), values_of(unit, attempt))
    collect_garbage(objects, delete=True)
    assert verify_run(objects, deep=True).problems == []
    attempts = {info.name.split("/")[2] for info in objects.list("data/")}
    assert attempts == {read_commit(objects, key).attempt for key in committed.values()}
