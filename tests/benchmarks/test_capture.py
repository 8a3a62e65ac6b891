"""The capture benchmark runs whole on a tiny model: every figure is there, and its runs verify."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.engine


def test_every_measurement_is_there_and_what_was_written_verifies(tiny_qwen3_dir, tmp_path):
    report_file = tmp_path / "report.json"
    run_in = tmp_path / "runs"
    run_in.mkdir()
    done = subprocess.run(
        [
            sys.executable, "benchmarks/capture.py", str(tiny_qwen3_dir), "--json", report_file,
            "--lengths", "32,96", "--tokens", "512", "--repeats", "2", "--max-model-len", "256",
            "--run-in", run_in, "--run-length", "64", "--run-tokens", "2048",
            "--unit-tokens", "512", "--host-bytes", "268435456", "--slot-bytes", "8388608",
            "--codec", "fast", "--heads", "5", "--verify", "--soak-seconds", "2",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    report = json.loads(report_file.read_text())
    measured = report["measurements"]
    assert [(one["what"], one["prompt_tokens"]) for one in measured] == [
        ("staged", 32), ("staged", 96), ("end to end", 64),
    ]  # fmt: skip
    for one in measured:
        pairs = list(zip(one["pairs"]["plain"], one["pairs"]["captured"], strict=True))
        assert len(pairs) == 2
        assert one["ratio"] == max(c for _, c in pairs) / max(p for p, _ in pairs) > 0
        assert one["median_ratio"] > 0
        assert one["gigabytes_per_second"] > 0
    end_to_end = measured[-1]
    assert set(end_to_end["phases"]) == {
        "ramp", "steady", "drain", "deleted_gb", "waited_for_deletion",
    }  # fmt: skip
    assert {"copy", "encode", "put", "stall", "steps", "rows"} <= set(end_to_end["timings"])
    assert end_to_end["timings"]["rows"] == 2048
    # 4 of 8 query heads over one of 2 KV heads, of 32 values of 4 bytes, in 3 layers.
    assert report["bytes_per_token"] == 3 * (4 + 1 + 1 + 4) * 32 * 4
    for rates in (report["committed_gb_per_s"], report["plain_writers_gb_per_s"]):
        assert len(rates[str(run_in)]) == 2
        assert min(rates[str(run_in)]) > 0
    assert end_to_end["gigabytes_per_second"] == max(report["committed_gb_per_s"][str(run_in)])
    memory = report["memory"]
    assert memory["units"] >= 1
    assert memory["slab_bytes"] == 256 << 20
    assert memory["minutes"][0]["pss"] > 0
    assert memory["within_budget"]
    assert {"platform", "cpus", "gpu"} <= set(report["machine"])
    assert list(run_in.iterdir()) == []
