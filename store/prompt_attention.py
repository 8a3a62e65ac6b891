"""One prompt's scores or patterns: labelled alike, whether stored or rebuilt from rot_q and rot_k.

Knows the prompt's arrays and the picked axes; never knows the run. Nothing is read before values
are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from store import rebuild, stored_pattern
from store.explain import ReadCost
from store.labelled import TokenAxis, label
from store.run_format import LayerSemantics, Site
from store.run_index import StoredPrompt
from store.selection import AxisSelection, Choice, select
from store.site_names import NamedSite
from store.strongest import strongest
from store.unit_arrays import PromptArray, UnitArrays

AttentionChoices = tuple[Choice, Choice, Choice, Choice]
"""Layers, query heads, queries and keys."""


@dataclass(frozen=True, slots=True)
class PromptAttention:
    """Picked layers, heads, queries and keys of a prompt's scores or pattern (`kind`)."""

    kind: str
    arrays: tuple[PromptArray, ...]
    """The stored pattern's array, or those of rot_q and rot_k."""
    picked: tuple[AxisSelection, ...]
    semantics: Mapping[int, LayerSemantics]

    @classmethod
    def of(
        cls,
        named: NamedSite,
        stored: StoredPrompt,
        arrays: UnitArrays,
        semantics: Mapping[int, LayerSemantics],
        choices: AttentionChoices,
        *,
        by_place: bool,
    ) -> PromptAttention:
        """Pick from a prompt that is stored. Raises as `store.selection.select` does."""
        layer, head, query, key = choices
        as_stored = named.site == Site.PATTERN and arrays.stores_pattern(stored)
        sites = (Site.PATTERN,) if as_stored else (Site.ROT_Q, Site.ROT_K)
        held = tuple(arrays.of(stored, site) for site in sites)
        picked = (
            *held[0].select(layer, head, None, by_place=by_place, named_layer=named.layer)[:2],
            select("query_pos", held[0].positions, query, by_place=by_place),
            select("key_pos", held[-1].positions, key, by_place=by_place),
        )
        return cls(named.site, held, picked, semantics)

    def labelled(self, tokens: TokenAxis) -> xr.DataArray:
        """Return all that was picked."""
        return label(self.kind, self._values(self.picked), self.picked, tokens)

    def strongest(self, n: int, tokens: TokenAxis) -> xr.DataArray:
        """Return the `n` strongest of the picked keys of each query, a tile of them at a time."""
        found = strongest(self._values, self.picked, n)
        data = label(self.kind, found.values, (*self.picked[:3], "top"), tokens)
        data.attrs["nans"] = found.nans
        return data.assign_coords(key_pos=(data.dims, found.key_pos.reshape(data.shape)))

    def cost(self) -> ReadCost:
        """Return what reading all that was picked would cost; reads nothing."""
        if len(self.arrays) == 1:
            return stored_pattern.pattern_cost(self.arrays[0], self.picked)
        rot_q, rot_k = self.arrays
        return rebuild.cost(self.kind, self.semantics, rot_q, rot_k, self.picked)

    def _values(self, picked: Sequence[AxisSelection]) -> NDArray[np.float32]:
        if len(self.arrays) == 1:
            return stored_pattern.read_pattern(self.arrays[0], picked)
        rot_q, rot_k = self.arrays
        return rebuild.attention(self.kind, self.semantics, rot_q, rot_k, picked)
