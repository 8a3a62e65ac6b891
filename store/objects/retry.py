"""How often and how long a store operation is tried again: bounded, with full jitter.

obstore repeats requests that failed on the way or with a 5xx by itself; what comes through to here
is a request that ran into its time-out, a body that broke off, or a server that stayed unwell.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

DEFAULT_ATTEMPTS = 5
DEFAULT_SECONDS = 180.0
T = TypeVar("T")


class Transient(Exception):
    """Wraps an error after which the same operation may well succeed; its cause is the error."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `attempts` tries, none started later than `seconds` after the first."""

    attempts: int = DEFAULT_ATTEMPTS
    seconds: float = DEFAULT_SECONDS
    first_wait: float = 0.1
    longest_wait: float = 10.0

    def call(self, operation: Callable[[], T]) -> T:
        """Return what `operation` returns; after the last try raise what its `Transient` wraps."""
        deadline = time.monotonic() + self.seconds
        wait = self.first_wait
        for attempt in range(1, self.attempts + 1):
            try:
                return operation()
            except Transient as error:
                pause = random.uniform(0, wait)
                if attempt == self.attempts or time.monotonic() + pause > deadline:
                    cause = error.__cause__
                    assert cause is not None
                    raise cause from None
                time.sleep(pause)
                wait = min(wait * 2, self.longest_wait)
        raise AssertionError("a policy allows at least one attempt")
