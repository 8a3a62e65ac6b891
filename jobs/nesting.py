"""How deep a value from a file is nested, against a bound that is stated.

What goes into a deep value recursively ends in a RecursionError somewhere, and where depends on who
calls whom; the bound does not.
"""

from __future__ import annotations

from typing import Any

MAX_NESTING = 100


def is_too_nested(value: Any) -> bool:
    """Whether lists and mappings lie more than `MAX_NESTING` deep in each other.

    Not recursive itself, and through at most that many levels of a list that holds itself.
    """
    level = [value] if isinstance(value, (dict, list, tuple)) else []
    for _ in range(MAX_NESTING):
        if not level:
            return False
        # What is named twice, as YAML can, counts once: levels do not multiply.
        inner = {
            id(one): one
            for outer in level
            for one in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(one, (dict, list, tuple))
        }
        level = list(inner.values())
    return bool(level)
