"""One site's rows of one stored prompt: which layers, heads and positions, and how to read them.

Knows commits and array records; never knows names of prompts beyond messages, or xarray. The layout
of a unit's array (its chunk offsets) is worked out once and kept for the units read last.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store import keys
from store.array_reader import ArrayReader
from store.errors import SiteNotFound
from store.explain import ReadCost
from store.packed_pattern import entry_offsets
from store.read_plan import ChunkLayout
from store.run_format import Commit, Site
from store.run_index import StoredPrompt
from store.selection import AxisSelection, Choice, select

KEPT_LAYOUTS = 256

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptArray:
    """The rows of one prompt in one site's array. Indices are into what is held."""

    row: int
    site: str
    prefix: str
    layout: ChunkLayout
    first_row: int
    positions: Indices
    reader: ArrayReader

    @property
    def layers(self) -> list[int]:
        return self.layout.record.layers

    @property
    def heads(self) -> list[int]:
        return self.layout.record.heads

    @property
    def head_axis(self) -> str:
        """The name of the head axis: `head`, or `kv_head` for rot_k and v."""
        return Site(self.site).head_dim_name if self.site in set(Site) else "head"

    def select(
        self,
        layer: Choice,
        head: Choice,
        pos: Choice,
        *,
        by_place: bool,
        named_layer: int | None = None,
    ) -> tuple[AxisSelection, AxisSelection, AxisSelection]:
        """Return the selections along layer, head and pos. Raises as `store.selection.select`."""
        layer_by_place = by_place and named_layer is None
        try:
            heads = select(self.head_axis, self.heads, head, by_place=by_place)
        except SiteNotFound as error:
            if self.head_axis == "kv_head":
                raise SiteNotFound(
                    f"{error}; {self.site} has one row per key-value head, which several query "
                    "heads share"
                ) from None
            raise
        return (
            select("layer", self.layers, layer, by_place=layer_by_place),
            heads,
            select("pos", self.positions, pos, by_place=by_place),
        )

    def read(self, layers: Indices, heads: Indices, places: Indices) -> NDArray[Any]:
        """Return values [L, H, P, D]; `places` count from the prompt's first row (or entry)."""
        return self.reader.read(self.prefix, self.layout, layers, heads, places + self.first_row)

    def cost(self, layers: Indices, heads: Indices, places: Indices) -> ReadCost:
        """Return what `read` of the same would cost with nothing cached; reads nothing."""
        return self.reader.cost_of(self.layout, layers, heads, places + self.first_row)


class UnitArrays:
    """Finds a stored prompt's rows in its unit's arrays."""

    def __init__(self, reader: ArrayReader) -> None:
        self._reader = reader
        self._layouts: OrderedDict[tuple[str, str], ChunkLayout] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, stored: StoredPrompt, site: str) -> PromptArray:
        """Return the prompt's rows of a site. Raises `SiteNotFound` if its unit lacks the site."""
        commit = stored.commit
        prefix = keys.attempt_prefix(commit.unit, commit.attempt)
        layout = self._layout(prefix, commit, site)
        first_row = stored.first_row
        if layout.record.is_packed:
            first_row = int(entry_offsets(commit.prompts)[stored.place.place])
        return PromptArray(
            row=stored.place.row,
            site=site,
            prefix=prefix,
            layout=layout,
            first_row=first_row,
            positions=stored.positions,
            reader=self._reader,
        )

    def stores_pattern(self, stored: StoredPrompt) -> bool:
        """Whether the prompt's unit holds its patterns, so that they need no rebuilding."""
        return any(array.site == Site.PATTERN for array in stored.commit.arrays)

    def _layout(self, prefix: str, commit: Commit, site: str) -> ChunkLayout:
        with self._lock:
            layout = self._layouts.pop((prefix, site), None)
            if layout is None:
                record = next((array for array in commit.arrays if array.site == site), None)
                if record is None:
                    raise SiteNotFound(
                        f"unit {commit.unit} holds no {site}; it holds "
                        f"{', '.join(array.site for array in commit.arrays) or 'nothing'}"
                    )
                layout = ChunkLayout(record, {one.name: one.crc32c for one in commit.objects})
            self._layouts[(prefix, site)] = layout
            while len(self._layouts) > KEPT_LAYOUTS:
                self._layouts.popitem(last=False)
            return layout
