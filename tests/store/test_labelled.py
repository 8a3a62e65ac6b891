"""Labelled arrays put together from their parts are what xarray's constructor makes."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from store import labelled
from store.labelled import TokenAxis, label
from store.selection import select

TOKENS = TokenAxis("p7", ["The", " cap", "ital"])
LAYERS, POSITIONS = [3, 5], [0, 1, 2, 3]


@pytest.mark.parametrize("from_parts", [True, False])
@pytest.mark.parametrize("layer", [None, 5, [5, 3]])
@pytest.mark.parametrize("pos", [None, 3, slice(1, 3), []])
def test_the_same_as_by_the_constructor(layer, pos, from_parts, monkeypatch) -> None:
    assert labelled._FROM_PARTS, "this xarray puts nothing together from parts"
    monkeypatch.setattr(labelled, "_FROM_PARTS", from_parts)
    layers, places = select("layer", LAYERS, layer), select("pos", POSITIONS, pos)
    values = np.random.default_rng(1).random((len(layers), len(places), 2))
    got = label("z", values, (layers, places, "d_head"), TOKENS)
    strings = [[*TOKENS.strings, ""][at] for at in places.labels.tolist()]
    coords: dict[str, object] = {"prompt": "p7"}
    coords["layer"] = 5 if layer == 5 else ("layer", layers.labels)
    coords["pos"] = 3 if pos == 3 else ("pos", places.labels)
    coords["token"] = "" if pos == 3 else ("pos", np.asarray(strings, object))
    dims = [dim for dim, one in (("layer", layer == 5), ("pos", pos == 3)) if not one]
    shape = [size for size, one in ((len(layers), layer == 5), (len(places), pos == 3)) if not one]
    want = xr.DataArray(values.reshape(*shape, 2), dims=[*dims, "d_head"], coords=coords, name="z")
    assert got.identical(want)
    assert repr(got) == repr(want)
    assert {name: type(index) for name, index in got.xindexes.items()} == {
        name: type(index) for name, index in want.xindexes.items()
    }
    for name in want.coords:
        assert got.coords[name].dtype == want.coords[name].dtype
    if pos is None and layer is None:
        assert got.sel(layer=5, pos=2).token.item() == "ital"
        assert (got + 1).mean("pos").dims == ("layer", "d_head")
        assert got.isel(pos=[2, 0]).to_dataframe().shape == (8, 3)
