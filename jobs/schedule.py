"""Which unit goes next: pure bookkeeping over the plan's units, about 40 bytes a unit.

Longest first, so that no long unit is left for the end. Units that came back uncharged go before
the rest; units under suspicion go alone. Knows no workers, no time, no store: `jobs.dispatch` asks
`take` for a worker with or without other work and reports back what became of each unit.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jobs.messages import UnitOrder
from jobs.policy import (
    MAX_BLIND_FAILURES,
    MAX_SOLO_DEATHS,
    MAX_STORE_FAILURES,
    Try,
    next_try,
)

QUARANTINED = "quarantined: "
"""How the reason of a prompt that took engines down begins."""

_PENDING, _RUNNING, _DONE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class UnitTable:
    """The plan's units as columns, by unit number: int64 [num_units] each."""

    segment: np.ndarray
    first_prompt: np.ndarray
    num_prompts: np.ndarray
    num_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.num_tokens)


@dataclass(slots=True)
class _Suspicion:
    """What is held against a unit."""

    charges: int = 0
    blind_failures: int = 0
    store_failures: int = 0
    solo_deaths: dict[int, int] = field(default_factory=dict)
    masked: dict[int, str] = field(default_factory=dict)


class Schedule:
    """The state of every unit of one driver's life; commits in the store are the lasting truth."""

    def __init__(
        self,
        units: UnitTable,
        done: np.ndarray,
        max_attempts: int,
        repairs: Mapping[int, int] | None = None,
    ) -> None:
        """`done`: bool [num_units], the units committed and sound; `repairs`: unit -> the number
        of the commit that replaces its damaged one."""
        self._units = units
        self._max_attempts = max_attempts
        self._state = np.where(done, _DONE, _PENDING).astype(np.uint8)
        missing = np.flatnonzero(~done)
        order = np.argsort(-units.num_tokens[missing], kind="stable")
        self._order = missing[order].astype(np.int64)
        self._next = 0
        self._returned: deque[int] = deque()
        self._alone: deque[int] = deque()
        self._suspicions: dict[int, _Suspicion] = {}
        self._repairs = dict(repairs or {})
        self.num_missing = len(missing)

    @property
    def has_fresh(self) -> bool:
        """Whether units wait that may run together with others."""
        return bool(self._returned) or self._next < len(self._order)

    @property
    def has_alone(self) -> bool:
        """Whether units wait that must run alone."""
        return bool(self._alone)

    def take(self) -> UnitOrder | None:
        """Return an order for the next unit that may run beside others, if there is one."""
        while self._returned:
            unit = self._returned.popleft()
            if self._state[unit] == _PENDING:
                return self._ordered(unit)
        while self._next < len(self._order):
            unit = int(self._order[self._next])
            self._next += 1
            if self._state[unit] == _PENDING:
                return self._ordered(unit)
        return None

    def take_alone(self) -> UnitOrder | None:
        """Return an order for the next unit that must be the only one in its engine."""
        while self._alone:
            unit = self._alone.popleft()
            if self._state[unit] == _PENDING:
                return self._ordered(unit)
        return None

    def repeat(self, unit: int) -> UnitOrder:
        """Return an order for one more attempt at a running unit (a straggler's double)."""
        assert self._state[unit] == _RUNNING, unit
        return self._ordered(unit)

    def is_done(self, unit: int) -> bool:
        """Return whether the unit is committed."""
        return bool(self._state[unit] == _DONE)

    def done(self, unit: int) -> None:
        """The unit is committed."""
        if self._state[unit] != _DONE:
            self._state[unit] = _DONE
            self.num_missing -= 1
        self._suspicions.pop(unit, None)

    def requeue(self, unit: int) -> None:
        """The unit came back through no fault of its own."""
        if self._state[unit] == _RUNNING:
            self._put_back(unit)

    def store_refuses(self, unit: int) -> bool:
        """Note that the store failed under the unit and works; return whether to charge it."""
        suspicion = self._suspicions.setdefault(unit, _Suspicion())
        suspicion.store_failures += 1
        return suspicion.store_failures > MAX_STORE_FAILURES

    def charge(self, unit: int, error: str, running_place: int | None = None) -> None:
        """The unit may have caused a failure. `running_place`: the prompt that ran quite alone."""
        if self._state[unit] == _DONE:
            return
        suspicion = self._suspicions.setdefault(unit, _Suspicion())
        one_by_one = next_try(suspicion.charges, self._max_attempts) is Try.ONE_BY_ONE
        suspicion.charges += 1
        if running_place is not None:
            self._blame(suspicion, running_place, error)
        elif one_by_one:
            suspicion.blind_failures += 1
            if suspicion.blind_failures == MAX_BLIND_FAILURES:
                self._give_up(unit, suspicion, error)
        if self._state[unit] == _RUNNING:
            self._put_back(unit)

    def is_hopeless(self, unit: int) -> bool:
        """Return whether the unit goes on failing although it was given up and runs nothing."""
        known = self._suspicions.get(unit)
        return known is not None and known.blind_failures >= 2 * MAX_BLIND_FAILURES

    def _blame(self, suspicion: _Suspicion, place: int, error: str) -> None:
        deaths = suspicion.solo_deaths[place] = suspicion.solo_deaths.get(place, 0) + 1
        if deaths >= MAX_SOLO_DEATHS:
            suspicion.masked[place] = (
                f"{QUARANTINED}it failed {deaths} times running alone after its unit had failed "
                f"{suspicion.charges - deaths} times; the last error: {error.strip()}"
            )

    def _give_up(self, unit: int, suspicion: _Suspicion, error: str) -> None:
        reason = f"{QUARANTINED}its unit failed whole, again and again: {error.strip()}"
        for place in range(int(self._units.num_prompts[unit])):
            suspicion.masked.setdefault(place, reason)

    def charges(self, unit: int) -> int:
        """Return how many failures are charged to the unit."""
        known = self._suspicions.get(unit)
        return known.charges if known else 0

    def _put_back(self, unit: int) -> None:
        self._state[unit] = _PENDING
        together = next_try(self.charges(unit), self._max_attempts) is Try.TOGETHER
        (self._returned if together else self._alone).append(unit)

    def _ordered(self, unit: int) -> UnitOrder:
        assert self._state[unit] != _DONE, unit
        self._state[unit] = _RUNNING
        known = self._suspicions.get(unit) or _Suspicion()
        one_by_one = next_try(known.charges, self._max_attempts) is Try.ONE_BY_ONE
        return UnitOrder(
            unit=unit,
            attempt=f"{known.charges}-{secrets.token_hex(8)}",
            segment=int(self._units.segment[unit]),
            first_prompt=int(self._units.first_prompt[unit]),
            num_prompts=int(self._units.num_prompts[unit]),
            num_tokens=int(self._units.num_tokens[unit]),
            masked=tuple(sorted(known.masked.items())),
            batch_prompts=1 if one_by_one else 0,
            repair=self._repairs.get(unit, 0),
        )
