"""Which of two lots a file of tests belongs to: `make test` runs each in a process of its own.

Files whose tests start an engine or Ray take turns; all others run beside them.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINES, REST = "engines", "the rest"
HEAVY_MARKS = ("pytest.mark.engine", "pytest.mark.ray")


@cache
def lot(file: str) -> str:
    """Return the lot of a file of tests, which is named from the root."""
    text = (ROOT / file).read_text()
    return ENGINES if any(mark in text for mark in HEAVY_MARKS) else REST


def assert_may_start_engines() -> None:
    """Assert that the test at work, if any, is of the lot that starts engines."""
    file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    assert not file or lot(file) == ENGINES, f"{file} starts an engine: mark it with it"
