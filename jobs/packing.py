"""Prompts into units: contiguous, of about `unit_tokens` tokens, and of no more than so many bytes
where that is asked for. Pure, and the same every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_UNIT_PROMPTS = 8192
"""A unit of one-token prompts would otherwise carry a commit of tens of thousands of outcomes."""


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """`num_prompts` prompts from `first_prompt` on; `num_tokens` counts those that run."""

    unit: int
    first_prompt: int
    num_prompts: int
    num_tokens: int


class UnitPacker:
    """Takes prompts' row counts one after the other and gives units as they fill up.

    A unit never holds more than `unit_tokens` rows and never takes more than `unit_bytes`, except
    where a single prompt does. `bytes_of` says what a prompt of so many rows takes.
    """

    def __init__(
        self,
        unit_tokens: int,
        first_unit: int = 0,
        first_prompt: int = 0,
        *,
        unit_bytes: int | None = None,
        bytes_of: Callable[[int], int] = lambda _rows: 0,
    ) -> None:
        self._unit_tokens, self._unit_bytes = unit_tokens, unit_bytes
        self._bytes_of = bytes_of
        self._unit = first_unit
        self._first = first_prompt
        self._prompts = self._tokens = self._bytes = 0

    def add(self, rows: int) -> PlannedUnit | None:
        """Add the next prompt; return the unit before it if that is full now."""
        full = None
        size = 0 if self._unit_bytes is None else self._bytes_of(rows)
        over = self._tokens + rows > self._unit_tokens or (
            self._unit_bytes is not None and self._bytes + size > self._unit_bytes
        )
        if (over and self._tokens > 0) or self._prompts >= MAX_UNIT_PROMPTS:
            full = self.close()
        self._prompts += 1
        self._tokens += rows
        self._bytes += size
        return full

    def close(self) -> PlannedUnit | None:
        """Return the last, partly filled unit, if any."""
        if not self._prompts:
            return None
        unit = PlannedUnit(self._unit, self._first, self._prompts, self._tokens)
        self._unit += 1
        self._first += self._prompts
        self._prompts = self._tokens = self._bytes = 0
        return unit
