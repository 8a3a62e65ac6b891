"""docs/reading.md, run from top to bottom on the demo's run; what it prints is compared."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "reading.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
DONE_WITH_FAILED_PROMPTS = 3


@pytest.fixture(scope="module")
def demo_run(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's run, captured once: every prompt of the examples through SmolLM2."""
    kept = os.environ.get("ATTNSTORE_DEMO_RUN")
    if kept:
        return Path(kept).resolve()
    folder = tmp_path_factory.mktemp("demo") / "demo-run"
    command = [
        sys.executable, "-m", "jobs.cli", "run", "examples/demo.yaml",
        "--set", f"output={folder}", "--set", f"model.path={smollm2_dir}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == DONE_WITH_FAILED_PROMPTS, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_page_does_what_it_says(demo_run: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "demo-run").symlink_to(demo_run)
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 8
    names: dict[str, object] = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), names)
        shown = "\n".join(line.rstrip() for line in printed.getvalue().splitlines())
        assert shown == expected.rstrip("\n"), code
    assert (tmp_path / "induction.png").stat().st_size > 20_000
