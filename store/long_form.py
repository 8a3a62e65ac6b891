"""A small slice as a long table, one row a value, for pandas, polars or SQL.

Knows one labelled array; never knows a run. `polars.from_arrow(long_form(a))`,
`long_form(a).to_pandas()`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import xarray as xr

MAX_VALUES = 50_000_000


def long_form(array: xr.DataArray) -> pa.Table:
    """Return one row per value: every coordinate, then `value` (bfloat16 as float32).

    Raises `ValueError` above 50 million values: take a smaller slice, or `Run.batches`.
    """
    if array.size > MAX_VALUES:
        raise ValueError(
            f"{array.size:,} values as a long table; take a slice of at most {MAX_VALUES:,}"
        )
    columns: dict[str, Any] = {}
    for name in (*array.coords, *(dim for dim in array.dims if dim not in array.coords)):
        if name in array.coords:
            spread = array.coords[name].broadcast_like(array).transpose(*array.dims).values
        else:
            places = xr.DataArray(np.arange(array.sizes[name]), dims=[name])
            spread = places.broadcast_like(array).transpose(*array.dims).values
        columns[str(name)] = pa.array(spread.ravel())
    values = array.values
    if values.dtype == np.dtype(ml_dtypes.bfloat16):
        values = values.astype(np.float32)
    columns["value"] = pa.array(values.ravel())
    return pa.table(columns)
