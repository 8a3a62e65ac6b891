"""Byte counts read alike wherever they are printed."""

from __future__ import annotations

import re
from pathlib import Path

from store.byte_count import human_bytes

ROOT = Path(__file__).resolve().parents[2]


def test_three_digits_and_a_decimal_unit() -> None:
    counts = (0, 999, 1000, 1500, 123_456, 999_700, 2.5e9, 64 << 20, 3e15)
    assert [human_bytes(count) for count in counts] == [
        "0 B", "999 B", "1 kB", "1.5 kB", "123 kB", "1 MB", "2.5 GB", "67.1 MB", "3 PB",
    ]  # fmt: skip


def test_nobody_else_formats_a_byte_count() -> None:
    own = re.compile(r"\} ?[kKMGTP]i?B\b(?!/s)")
    for package in ("capture", "jobs", "store"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name == "byte_count.py":
                continue
            found = [line.strip() for line in path.read_text().splitlines() if own.search(line)]
            assert not found, f"{path.relative_to(ROOT)} formats bytes itself: {found}"
