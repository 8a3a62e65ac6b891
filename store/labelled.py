"""From a numpy array and the selections that made it to a labelled `xarray.DataArray`.

Knows axis names, labels and token strings; reads nothing. A scalar selection drops its dimension
and stays as a scalar coordinate, as xarray's own indexing does.

xarray's constructor looks over every coordinate for what it may have to convert, which takes longer
than reading a small part of a prompt. Here all of them have their final form already, so the array
is put together from its parts, as xarray does itself; where an xarray cannot, by its constructor.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from xarray.indexes import Index, PandasIndex

from store.selection import AxisSelection

_TOKEN_COORDINATE = {"pos": "token", "query_pos": "query_token", "key_pos": "key_token"}
_FROM_PARTS = {"indexes", "fastpath"} <= set(inspect.signature(xr.DataArray).parameters)


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
    coords: dict[Hashable, xr.Variable] = {"prompt": _scalar(tokens.prompt_id)}
    indexes: dict[Hashable, Index] = {}
    for axis, size in zip(axes, values.shape, strict=True):
        if isinstance(axis, str):
            dims.append(axis)
            shape.append(size)
            continue
        token_name = _TOKEN_COORDINATE.get(axis.name)
        strings = None if token_name is None else _strings(axis, tokens.strings)
        if axis.scalar:
            coords[axis.name] = _scalar(int(axis.labels[0]))
            if token_name is not None and strings is not None:
                coords[token_name] = _scalar(strings[0])
            continue
        dims.append(axis.name)
        shape.append(size)
        indexes[axis.name] = PandasIndex(axis.labels, axis.name)
        coords |= indexes[axis.name].create_variables()
        if token_name is not None and strings is not None:
            coords[token_name] = xr.Variable((axis.name,), strings, fastpath=True)
    data = xr.Variable(dims, values.reshape(shape), fastpath=True)
    if _FROM_PARTS:
        return xr.DataArray(data, coords=coords, name=name, indexes=indexes, fastpath=True)
    return xr.DataArray(data, coords=xr.Coordinates(coords, indexes), name=name)


def _scalar(value: str | int) -> xr.Variable:
    return xr.Variable((), np.asarray(value), fastpath=True)


def _strings(axis: AxisSelection, strings: Sequence[str]) -> NDArray[Any]:
    out = np.empty(len(axis), object)
    held = len(strings)
    out[:] = [strings[at] if at < held else "" for at in axis.labels.tolist()]
    return out
