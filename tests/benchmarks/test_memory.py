"""The memory watch sees what this process and its children hold."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np

from benchmarks.memory import MemoryWatch, Sample, process_tree, sample, summary

MIB = 1 << 20


def test_memory_of_this_process_and_of_a_child_is_counted():
    before = sample(os.getpid(), 0.0)
    held = np.ones(64 * MIB, np.uint8)
    program = f"x = bytearray(b'1') * {64 * MIB}; print(1, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    try:
        assert child.pid in process_tree(os.getpid())
        after = sample(os.getpid(), 1.0)
        assert after.anonymous - before.anonymous > 120 * MIB
        assert after.pss > before.pss
    finally:
        child.communicate(b"\n")
    assert held[0] == 1


def test_a_watch_samples_until_it_is_stopped():
    watch = MemoryWatch(lambda: 7)
    deadline = time.monotonic() + 30
    while not watch.samples and time.monotonic() < deadline:
        time.sleep(0.01)
    samples = watch.stop()
    assert len(samples) >= 2
    assert all(one.device == 7 and one.pss > MIB for one in samples)


def test_growth_shows_between_the_first_and_the_last_minute():
    samples = [Sample(second, 0, 100 + second, 0, 0, 0, 1) for second in range(181)]
    found = summary(samples, Sample(0, 0, 50, 0, 0, 0, 1), budget_bytes=200)
    assert [minute["pss"] for minute in found["minutes"]] == [129, 189, 249, 280]
    assert found["first_minute"]["pss"] == 130
    assert found["last_minute"]["pss"] == 250
    assert found["most_above_before"] == 230
    assert not found["within_budget"]
