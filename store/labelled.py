"""From a numpy array and the selections that made it to a labelled `xarray.DataArray`.

Knows axis names, labels and token strings; reads nothing. A scalar selection drops its dimension
and stays as a scalar coordinate, as xarray's own indexing does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from store.selection import AxisSelection

_TOKEN_COORDINATE = {"pos": "token", "query_pos": "query_token", "key_pos": "key_token"}


@dataclass(frozen=True, slots=True)
class TokenAxis:
    """The prompt whose positions an array has, and the token string at each of its positions."""

    prompt_id: str
    strings: Sequence[str]


def label(
    name: str, values: NDArray[Any], axes: Sequence[AxisSelection | str], tokens: TokenAxis
) -> xr.DataArray:
    """Return `values` with a dimension per axis; a plain string names an axis without labels."""
    dims: list[str] = []
    shape: list[int] = []
    coords: dict[str, Any] = {"prompt": tokens.prompt_id}
    for axis, size in zip(axes, values.shape, strict=True):
        if isinstance(axis, str):
            dims.append(axis)
            shape.append(size)
            continue
        token_name = _TOKEN_COORDINATE.get(axis.name)
        if axis.scalar:
            coords[axis.name] = int(axis.labels[0])
            if token_name is not None:
                coords[token_name] = _strings(axis, tokens.strings)[0]
            continue
        dims.append(axis.name)
        shape.append(size)
        coords[axis.name] = (axis.name, axis.labels)
        if token_name is not None:
            coords[token_name] = (axis.name, _strings(axis, tokens.strings))
    return xr.DataArray(values.reshape(shape), dims=dims, coords=coords, name=name)


def _strings(axis: AxisSelection, strings: Sequence[str]) -> NDArray[Any]:
    out = np.empty(len(axis), object)
    for place, position in enumerate(axis.labels.tolist()):
        out[place] = strings[position] if position < len(strings) else ""
    return out
