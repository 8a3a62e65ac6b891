"""Random generators that vLLM's runner can rewind on the CPU.

A step that reads only part of a prompt draws a token all the same, and the runner then takes the
draw back by moving the generator's offset, which only CUDA generators have: with a seed of its own,
such a prompt ends a CPU engine. These generators remember their state from before the step. Private
parts used: a request state's `generator` and the input batch's `generators`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


class RewindableGenerator(torch.Generator):
    """A CPU generator whose only offset to go back to is that of the last `mark`."""

    def mark(self) -> None:
        """Remember the state that a rewind returns to."""
        self._marked = self.get_state()

    def get_offset(self) -> int:
        """Return a number that `set_offset` ignores."""
        return 0

    def set_offset(self, _offset: int) -> None:
        """Return to the state of the last `mark`."""
        self.set_state(self._marked)


def make_rewindable(
    requests: Mapping[str, Any], generators: MutableMapping[int, torch.Generator]
) -> None:
    """Exchange the requests' generators for rewindable ones, and mark all of them."""
    exchanged: dict[int, RewindableGenerator] = {}
    for state in requests.values():
        generator = state.generator
        if generator is None:
            continue
        if not isinstance(generator, RewindableGenerator):
            state.generator = RewindableGenerator()
            state.generator.set_state(generator.get_state())
            exchanged[id(generator)] = state.generator
        state.generator.mark()
    for place, generator in generators.items():
        generators[place] = exchanged.get(id(generator), generator)
