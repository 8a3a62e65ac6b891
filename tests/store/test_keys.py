"""Names: built in one place, and read back only if they are safe."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import keys
from store.errors import UnsafeName

UNITS = st.integers(0, 10**10)


def _is_safe(name: str) -> bool:
    """The rule in other words: segments of letters, digits and `_.-`, none with `..`."""
    segments = name.split("/")
    plain = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", one) for one in segments)
    return plain and ".." not in name and len(name) <= 512


@given(st.text("aZ09_.-/ \n\\é", max_size=20))
def test_a_name_is_safe_or_refused(name):
    if _is_safe(name):
        assert keys.checked_name(name) == name
    else:
        with pytest.raises(UnsafeName):
            keys.checked_name(name)
    if "/" not in name and _is_safe(name):
        assert keys.checked_segment(name) == name


def test_long_names_are_refused_at_once():
    assert keys.checked_name("a" * 512)
    for name in ("a" * 513, "a." * 10**6, "a/" * 10**6):
        with pytest.raises(UnsafeName):
            keys.checked_name(name)


@given(UNITS, st.integers(0, 1000))
def test_commit_names_read_back(unit, repair):
    key = keys.commit_key(unit, repair)
    assert keys.parse_commit_key(key) == (unit, repair)
    assert keys.checked_name(key) == key
    if repair:
        mark = keys.repair_mark(unit, repair)
        assert keys.parse_repair_mark(mark) == (unit, repair)
        assert keys.parse_commit_key(mark) is None


@pytest.mark.parametrize(
    "key",
    [
        "commits/000000/1.json", "commits/000001/00000000.json", "commits/0/00000000.json",
        "commits/000000/00000000.r0.json", "commits/000000/00000000.r01.json",
        "commits/000000/00000000.json.tmp", "x/commits/000000/00000000.json",
        "commits/000000/000000000.json", "commits/repaired/00000000.r1",
    ],
)  # fmt: skip
def test_what_is_no_commit_is_not_taken_for_one(key):
    assert keys.parse_commit_key(key) is None


def test_negative_units_and_odd_attempts_are_refused():
    with pytest.raises(ValueError, match="never negative"):
        keys.unit_name(-1)
    for attempt in ("", "..", "a/b", ".a"):
        with pytest.raises(UnsafeName):
            keys.attempt_prefix(0, attempt)
