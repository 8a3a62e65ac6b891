"""Prompts into units: contiguous, of about `unit_tokens` tokens. Pure, and the same every time."""

from __future__ import annotations

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

    A unit never holds more than `unit_tokens` rows, except where a single prompt is longer.
    """

    def __init__(self, unit_tokens: int, first_unit: int = 0, first_prompt: int = 0) -> None:
        self._unit_tokens = unit_tokens
        self._unit = first_unit
        self._first = first_prompt
        self._prompts = 0
        self._tokens = 0

    def add(self, rows: int) -> PlannedUnit | None:
        """Add the next prompt; return the unit before it if that is full now."""
        full = None
        over = self._tokens + rows > self._unit_tokens and self._tokens > 0
        if over or self._prompts >= MAX_UNIT_PROMPTS:
            full = self.close()
        self._prompts += 1
        self._tokens += rows
        return full

    def close(self) -> PlannedUnit | None:
        """Return the last, partly filled unit, if any."""
        if not self._prompts:
            return None
        unit = PlannedUnit(self._unit, self._first, self._prompts, self._tokens)
        self._unit += 1
        self._first += self._prompts
        self._prompts = self._tokens = 0
        return unit
