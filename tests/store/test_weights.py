"""W_O: stored once, checked on every read, and what heads add to the residual through it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from store.errors import DamagedObject, SiteNotFound
from store.objects.local import LocalStore
from store.run import open_run
from store.weights import (
    OutputProjection,
    contributions,
    read_output_projection,
    weight_key,
    write_output_projection,
)
from tests.store.sample_run import SampleShape, write_run

HIDDEN = 48


def projection(dtype: str = "float32", layer: int = 1, seed: int = 0) -> OutputProjection:
    values = np.random.default_rng(seed).standard_normal((4, 16, HIDDEN))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return OutputProjection(layer, values.astype(kind))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_comes_back_bit_for_bit_and_is_written_once(tmp_path, dtype: str) -> None:
    objects = LocalStore(tmp_path)
    first = projection(dtype)
    write_output_projection(objects, first)
    write_output_projection(objects, projection(dtype, seed=1))
    got = read_output_projection(objects, 1).w_o_HDM
    assert got.dtype == first.w_o_HDM.dtype
    assert got.tobytes() == first.w_o_HDM.tobytes()
    torch = pytest.importorskip("safetensors.torch")
    held = torch.load_file(tmp_path / weight_key(1))["w_o"]
    assert tuple(held.shape) == (64, HIDDEN)


def test_any_flipped_byte_raises(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    write_output_projection(objects, projection())
    path = tmp_path / weight_key(1)
    data = path.read_bytes()
    places = [*range(0, 240, 7), *range(240, len(data), 997)]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 0x41
        objects.put(weight_key(1), [bytes(changed)])
        try:
            got = read_output_projection(objects, 1)
        except DamagedObject:
            continue
        assert got.w_o_HDM.tobytes() == projection().w_o_HDM.tobytes(), place
    with pytest.raises(SiteNotFound, match="no W_O of layer 2"):
        read_output_projection(objects, 2)


def test_contributions_sum_to_the_attention_output(tmp_path) -> None:
    objects, shape = LocalStore(tmp_path), SampleShape()
    (unit,) = write_run(objects, shape, [[40, 7]])
    run = open_run(str(tmp_path))
    with pytest.raises(SiteNotFound, match="no W_O of layer 1"):
        run.contribution("p1", layer=1)
    w_o = projection()
    write_output_projection(objects, w_o)
    z_TC = unit.arrays["z"][1, 40:].reshape(7, 64).astype(np.float64)
    whole = z_TC @ w_o.w_o_HDM.reshape(64, HIDDEN).astype(np.float64)
    got = run.contribution("p1", layer=1)
    assert got.dims == ("head", "pos", "d_model")
    np.testing.assert_allclose(got.sum("head").values, whole, atol=1e-4)
    one = run.contribution("p1", layer=-1, head=2, pos=slice(3, 5))
    assert one.dims == ("pos", "d_model")
    assert int(one.layer) == 1
    np.testing.assert_array_equal(one.values, got.sel(head=2, pos=[3, 4]).values)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit W_O"):
        contributions(np.zeros((2, 3, 16)), projection().w_o_HDM)
    assert contributions(np.zeros((4, 0, 16)), projection().w_o_HDM).shape == (4, 0, HIDDEN)
