"""The strongest entries of patterns: for each query the `n` keys that it attends to most.

Knows how to ask for a stretch of queries, not where the values come from: stored and rebuilt
patterns go the same way. Queries go through in tiles, so that no more than a tile of the pattern is
ever held, however long the prompt.

Legend: L layers, N heads, Q queries, K keys, n entries kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from store.errors import SelectionError
from store.selection import AxisSelection, integer

TILE_BYTES = 32 << 20
MAX_PADDED_BYTES = 256 << 20
"""An answer with room for more entries than there are keys may not be larger than this."""
NO_KEY = -1
ENTRY_BYTES = 4 + 8

Axes = tuple[AxisSelection, ...]


@dataclass(frozen=True, slots=True)
class Strongest:
    """[L, N, Q, n]: probabilities, largest first, and the positions of their keys.

    Where a query has fewer keys with any probability, the rest is 0 at `NO_KEY`. NaN comes after
    every number, also at `NO_KEY`; `nans` counts those of all keys, whether or not given out.
    """

    values: NDArray[np.float32]
    key_pos: NDArray[np.int64]
    nans: int = 0


def strongest(
    read: Callable[[Axes], NDArray[np.float32]],
    picked: Sequence[AxisSelection],
    n: int,
    tile_bytes: int = TILE_BYTES,
) -> Strongest:
    """Return the `n` largest entries of each query; `read` gives patterns [L, N, Q, K] of axes.

    Of equal entries the earlier key counts. Raises `ValueError` for an `n` below 1, and
    `SelectionError` for one so far above the number of keys that the answer is mostly padding.
    """
    entries = integer(n)
    if entries is None or entries < 1:
        raise ValueError(f"topk={n!r}: ask for at least one entry of each query, as an int")
    n = entries
    layers, heads, queries, keys = picked
    shape = (len(layers), len(heads), len(queries), n)
    if n > len(keys) and ENTRY_BYTES * math.prod(shape) > MAX_PADDED_BYTES:
        raise SelectionError(
            f"topk={n} of {len(keys)} keys makes {ENTRY_BYTES * math.prod(shape)} bytes, mostly of "
            f"nothing; ask for at most {len(keys)}"
        )
    found = Strongest(np.zeros(shape, np.float32), np.full(shape, NO_KEY, np.int64))
    kept = min(n, len(keys))
    if min(shape) == 0 or not kept:
        return found
    row_bytes = 4 * len(layers) * len(heads) * len(keys)
    rows = max(1, tile_bytes // row_bytes)
    nans = 0
    for start in range(0, len(queries), rows):
        tile = slice(start, min(len(queries), start + rows))
        pattern_LNQK = read((layers, heads, queries.part(tile), keys))
        nans += int(np.count_nonzero(np.isnan(pattern_LNQK)))
        # NaN is sorted last. Stable, so that equal entries come in the order of their keys.
        order = np.argsort(-pattern_LNQK, axis=-1, kind="stable")[..., :kept]
        values = np.take_along_axis(pattern_LNQK, order, axis=-1)
        found.values[:, :, tile, :kept] = values
        found.key_pos[:, :, tile, :kept] = np.where(values > 0, keys.labels[order], NO_KEY)
    return replace(found, nans=nans)
