"""The rows of a site with the largest values, from all of a run: block by block, never all of it.

Knows blocks of prompts; never knows a run. Values are float64, in which no norm of a stored type
overflows. A row whose value is NaN has no place in the order: it is left out and counted, and hides
no other row.

Legend: L layers, N heads, R rows, D head size.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store.errors import SelectionError
from store.prompt_blocks import BlockReader, Chosen
from store.selection import integer


@dataclass(frozen=True, slots=True, order=True)
class TopRow:
    """A row and its value."""

    value: float
    prompt: int
    pos: int
    layer: int
    head: int


@dataclass(frozen=True, slots=True)
class TopRows:
    """The rows, the largest value first, and how many rows were left out since theirs is NaN."""

    rows: tuple[TopRow, ...]
    left_out: int


def top_rows(
    chosen: Chosen, reader: BlockReader, k: int, direction_D: NDArray[Any] | None
) -> TopRows:
    """Return the k rows with the largest value.

    The value is the dot product with `direction_D`, or the norm if it is None; it may be infinite
    where a row is. Ties go to the earlier prompt, position, layer and head. Raises `SelectionError`
    for a `k` below 1 and a direction that is not one finite number per component.
    """
    kept = integer(k)
    if kept is None or kept < 1:
        raise SelectionError(f"k={k!r}: ask for at least one row")
    best: list[tuple[float, int, int, int, int]] = []
    left_out = 0
    for block in chosen.blocks:
        layers, heads = reader.axes(block)
        found_LNR = _values(reader.read(block), direction_D)
        prompts = block.prompts()
        prompt = np.concatenate([np.full(len(p.places), p.row) for p in prompts])
        pos = np.concatenate([p.positions for p in prompts])
        flat = found_LNR.ravel()
        places = np.flatnonzero(~np.isnan(flat))
        left_out += flat.size - places.size
        if places.size > kept:
            # Every row that ties with the last one stays, for the order below to choose among.
            least = np.partition(flat[places], places.size - kept)[places.size - kept]
            places = places[flat[places] >= least]
        for place in places.tolist():
            layer, head, row = np.unravel_index(place, found_LNR.shape)
            entry = (
                float(flat[place]),
                -int(prompt[row]),
                -int(pos[row]),
                -int(layers.labels[layer]),
                -int(heads.labels[head]),
            )
            if len(best) < kept:
                heapq.heappush(best, entry)
            else:
                heapq.heappushpop(best, entry)
    rows = (TopRow(v, -p, -s, -n, -h) for v, p, s, n, h in sorted(best, reverse=True))
    return TopRows(tuple(rows), left_out)


def _values(values_LNRD: NDArray[Any], direction_D: NDArray[Any] | None) -> NDArray[np.float64]:
    """Return each row's value [L, N, R]."""
    values = values_LNRD.astype(np.float64)
    if direction_D is None:
        norms: NDArray[np.float64] = np.sqrt(np.einsum("lnrd,lnrd->lnr", values, values))
        return norms
    direction = np.asarray(direction_D)
    size = values.shape[-1]
    if direction.shape != (size,):
        raise SelectionError(
            f"the direction has shape {direction.shape}; give {size} numbers, one a component"
        )
    direction = direction.astype(np.float64)
    if not np.isfinite(direction).all():
        raise SelectionError("the direction has NaN or infinite components: no row has a value")
    with np.errstate(invalid="ignore"):
        products: NDArray[np.float64] = values @ direction
    return products
