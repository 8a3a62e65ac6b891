"""`attnstore run` on the real engine and real Ray: complete, and idempotent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from store import open_run
from tests.capture.comparison import assert_stored_patterns
from tests.jobs.run_process import ROOT, assert_complete, object_stamps

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

Configs = Callable[..., Path]


def attnstore(*arguments: str) -> tuple[int, str]:
    """Run a verb to its end; return exit code and standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + (done.stderr if done.returncode not in (0, 3) else "")


def test_a_run_with_bad_prompts_is_complete_and_running_again_changes_nothing(
    engine_config: Configs, tmp_path: Path
) -> None:
    records = [{"id": f"p{i}", "text": f"prompt number {i}", "kind": "x"} for i in range(40)]
    records += [{"id": "empty", "text": ""}, {"id": "long", "text": "long " * 300}]
    records += [{"id": "twin-a", "text": "the same"}, {"id": "twin-b", "text": "the same"}]
    config = engine_config(records, capture={"unit_tokens": 256, "pattern": "stored"})
    output = tmp_path / "run"
    code, text = attnstore("run", str(config), "--dry-run", "--json")
    estimate = json.loads(text)
    code, text = attnstore("run", str(config))
    assert code == 3, text
    assert_complete(output, failed=["empty", "long"])
    shards = [path for path in (output / "data").rglob("c/**/*") if path.is_file()]
    assert estimate["raw_bytes"] == sum(path.stat().st_size for path in shards)
    written = [*shards, *(output / "data").rglob("zarr.json"), *output.rglob("commits/*/*.json")]
    assert estimate["objects"] == len(written)
    before = object_stamps(output)
    started = time.monotonic()
    code, text = attnstore("run", str(config))
    assert code == 3, text
    assert time.monotonic() - started < 30
    assert object_stamps(output) == before

    code, text = attnstore("status", str(output), "--json")
    status = json.loads(text)
    code, watched = attnstore("status", str(output), "--json", "--watch")
    assert (code, watched) == (0, text)
    assert status["units"]["planned"] == status["units"]["committed"] > 2
    assert status["prompts"] == {"planned": 44, "stored": 42, "failed": 2, "skipped": 0}
    assert status["bytes"] > 0
    (check,) = status["checks"]
    assert (check["prompts"], check["tensor_parallel_size"]) == (4, 1)
    assert max(check["batched"], check["mixed"], check["reference"]) < 1e-4
    code, text = attnstore("verify", str(output), "--deep", "--json")
    assert (code, json.loads(text)["problems"]) == (0, [])
    code, text = attnstore("ls", str(output), "--failed", "--json")
    reasons = {row["prompt_id"]: row["reason"] for row in map(json.loads, text.splitlines())}
    assert set(reasons) == {"empty", "long"}
    assert "too long" in reasons["long"]

    run = open_run(str(output))
    assert [figures.mixed for figures in run.checks] == [check["mixed"]]
    twins = [run.read("z", prompt=name).values for name in ("twin-a", "twin-b")]
    np.testing.assert_allclose(twins[0], twins[1], atol=1e-4)
    assert_stored_patterns(run, "p7", 2**-11)
    picture = tmp_path / "pattern.png"
    shown = ("--prompt", "p7", "--layer", "1", "--head", "2", "--out", str(picture))
    code, text = attnstore("show", str(output), *shown)
    assert (code, text.strip()) == (0, str(picture))
    code, text = attnstore("show", str(output), *shown, "--json")
    assert json.loads(text) == {"path": str(picture)}
    assert picture.read_bytes().startswith(b"\x89PNG")

    victim = next(path for path in sorted((output / "data").rglob("c/*/*/*/*")))
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data)
    code, text = attnstore("verify", str(output), "--deep", "--json")
    assert code == 2
    assert len(json.loads(text.splitlines()[0])["problems"]) == 1
