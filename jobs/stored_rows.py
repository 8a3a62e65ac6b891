"""How many rows a prompt or a unit puts on the token axis: what positions and generation leave.

Exact, except that a continued prompt may end before its last token: then it is the most there can
be. Pure arithmetic over token counts; knows no prompts and no stores.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capture.rows import ALL_POSITIONS, Positions
from jobs.config import PatternMode, RunConfig
from jobs.model_identity import max_model_len

Counts = NDArray[np.int64]


class StoredRows:
    """A config's rule from token counts to row counts."""

    def __init__(self, config: RunConfig) -> None:
        self._positions: Positions = config.capture.kept_positions()
        self._generated = config.generate.tokens
        self._patterns = config.capture.pattern is PatternMode.STORED
        self._longest = max_model_len(config.model) if self._generated else 0

    @property
    def all_tokens(self) -> bool:
        """Whether rows are just tokens, so that a unit's own count says it all.

        It does not where patterns are stored: they grow with the square of each prompt.
        """
        return self._positions == ALL_POSITIONS and not self._generated and not self._patterns

    def of_prompts(self, num_tokens: Counts) -> Counts:
        """Return each prompt's rows; 0 tokens stand for a prompt that does not run."""
        lengths, places = np.unique(num_tokens, return_inverse=True)
        rows = np.array([self.of_prompt(int(length)) for length in lengths], dtype=np.int64)
        return rows[places] if len(rows) else rows

    def of_prompt(self, num_tokens: int) -> int:
        """Return the rows of one prompt of so many tokens; none for one that does not run."""
        if not num_tokens:
            return 0
        if self._generated:
            # The last sampled token is never fed, so it has no row.
            num_tokens = min(num_tokens + self._generated, self._longest) - 1
        return self._positions.of(num_tokens)[1]

    def are_cut_short(self, num_tokens: Counts) -> NDArray[np.bool_]:
        """Return which prompts have no room for all generated tokens in the longest sequence."""
        longer = num_tokens + self._generated > self._longest
        return longer & (num_tokens > 0) & (self._generated > 0)

    def of_units(self, num_tokens: Counts, num_prompts: Counts) -> Counts:
        """Return the most rows that units of so many tokens and prompts can have."""
        most = num_tokens
        if self._generated:
            most = most + num_prompts * (self._generated - 1)
        span = self._span()
        return most if span is None else np.minimum(most, num_prompts * span)

    def _span(self) -> int | None:
        """The most positions that any prompt can keep; None where that depends on its length."""
        start, stop = self._positions.start or 0, self._positions.stop
        if start < 0:
            return -start if stop is None or stop >= 0 else max(0, stop - start)
        return None if stop is None or stop < 0 else max(0, stop - start)
