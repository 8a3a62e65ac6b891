"""W_O: stored once, checked on every read, and what heads add to the residual through it."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from store.errors import DamagedObject, FormatError, SiteNotFound
from store.objects.local import LocalStore
from store.run import open_run
from store.verify import verify_run
from store.weights import (
    OutputProjection,
    contributions,
    read_output_projection,
    weight_key,
    write_output_projection,
)
from tests.store.sample_run import RUN_ID, SampleShape, write_run

HIDDEN = 64


def projection(
    dtype: str = "float32", layer: int = 1, seed: int = 0, *, bias: bool = False
) -> OutputProjection:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((4, 16, HIDDEN))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    bias_M = rng.standard_normal(HIDDEN).astype(kind) if bias else None
    return OutputProjection(layer, values.astype(kind), bias_M)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_comes_back_bit_for_bit_and_is_written_once(tmp_path, dtype: str) -> None:
    objects = LocalStore(tmp_path)
    first = projection(dtype)
    write_output_projection(objects, first, RUN_ID)
    write_output_projection(objects, projection(dtype, seed=1), RUN_ID)
    got = read_output_projection(objects, 1, RUN_ID).w_o_HDM
    assert got.dtype == first.w_o_HDM.dtype
    assert got.tobytes() == first.w_o_HDM.tobytes()
    torch = pytest.importorskip("safetensors.torch")
    held = torch.load_file(tmp_path / weight_key(1))
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == {"w_o": (64, HIDDEN)}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_bias_is_stored_beside_it_and_its_absence_means_none(tmp_path, dtype: str) -> None:
    objects = LocalStore(tmp_path)
    first = projection(dtype, bias=True)
    write_output_projection(objects, first, RUN_ID)
    write_output_projection(objects, projection(dtype, layer=2), RUN_ID)
    got = read_output_projection(objects, 1, RUN_ID)
    assert got.w_o_HDM.tobytes() == first.w_o_HDM.tobytes()
    assert got.bias_M is not None
    assert first.bias_M is not None
    assert got.bias_M.dtype == first.bias_M.dtype
    assert got.bias_M.tobytes() == first.bias_M.tobytes()
    assert read_output_projection(objects, 2, RUN_ID).bias_M is None
    torch = pytest.importorskip("safetensors.torch")
    held = torch.load_file(tmp_path / weight_key(1))
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == {
        "w_o": (64, HIDDEN),
        "bias": (HIDDEN,),
    }


def test_a_bias_that_is_no_bias_is_refused(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    write_output_projection(objects, projection(bias=True), RUN_ID)
    path = tmp_path / weight_key(1)
    data = path.read_bytes()
    for old, new in ((b'"bias"', b'"base"'), (b"[64]", b"[63]"), (b'"w_o"', b'"w_q"')):
        assert old in data
        objects.put(weight_key(1), [data.replace(old, new)])
        with pytest.raises(DamagedObject, match="not readable"):
            read_output_projection(objects, 1, RUN_ID)


@pytest.mark.parametrize("bias", [False, True])
def test_any_flipped_byte_raises(tmp_path, bias: bool) -> None:
    objects = LocalStore(tmp_path)
    stored = projection(bias=bias)
    write_output_projection(objects, stored, RUN_ID)
    path = tmp_path / weight_key(1)
    data = path.read_bytes()
    places = [*range(0, 240, 7), *range(240, len(data), 997)]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 0x41
        objects.put(weight_key(1), [bytes(changed)])
        try:
            got = read_output_projection(objects, 1, RUN_ID)
        except DamagedObject:
            continue
        assert got.w_o_HDM.tobytes() == stored.w_o_HDM.tobytes(), place
        assert (got.bias_M is None) == (stored.bias_M is None), place
        if stored.bias_M is not None and got.bias_M is not None:
            assert got.bias_M.tobytes() == stored.bias_M.tobytes(), place
    with pytest.raises(SiteNotFound, match="no W_O of layer 2"):
        read_output_projection(objects, 2, RUN_ID)


def test_contributions_sum_to_the_attention_output(tmp_path) -> None:
    objects, shape = LocalStore(tmp_path), SampleShape()
    (unit,) = write_run(objects, shape, [[40, 7]])
    run = open_run(str(tmp_path))
    with pytest.raises(SiteNotFound, match="no W_O of layer 1"):
        run.contribution("p1", layer=1)
    w_o = projection()
    write_output_projection(objects, w_o, RUN_ID)
    z_TC = unit.arrays["z"][1, 40:].reshape(7, 64).astype(np.float64)
    whole = z_TC @ w_o.w_o_HDM.reshape(64, HIDDEN).astype(np.float64)
    got = run.contribution("p1", layer=1)
    assert got.dims == ("head", "pos", "d_model")
    np.testing.assert_allclose(got.sum("head").values, whole, atol=1e-4)
    one = run.contribution("p1", layer=-1, head=2, pos=slice(3, 5))
    assert one.dims == ("pos", "d_model")
    assert int(one.layer) == 1
    np.testing.assert_array_equal(one.values, got.sel(head=2, pos=[3, 4]).values)
    none = run.output_bias(1)
    assert none.dims == ("d_model",)
    assert none.shape == (HIDDEN,)
    assert not none.values.any()
    with pytest.raises(SiteNotFound, match="layer"):
        run.output_bias(99)


def test_contributions_are_of_what_goes_into_w_o_where_that_is_not_z(tmp_path) -> None:
    objects, sites = LocalStore(tmp_path), ("z", "proj_in")
    (unit,) = write_run(objects, SampleShape(sites=sites), [[5]])
    w_o = projection()
    write_output_projection(objects, w_o, RUN_ID)
    got = open_run(str(tmp_path)).contribution("p0", layer=1, head=2)
    gated, z = (unit.arrays[site][1, :, 2] @ w_o.w_o_HDM[2] for site in ("proj_in", "z"))
    np.testing.assert_allclose(got.values, gated, atol=1e-4)
    assert np.abs(gated - z).max() > 1


def test_a_runs_bias_is_that_of_the_layer(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), [[5]])
    run = open_run(str(tmp_path))
    with pytest.raises(SiteNotFound, match="no W_O of layer 1"):
        run.output_bias(1)
    w_o = projection(bias=True)
    write_output_projection(objects, w_o, RUN_ID)
    assert int(run.output_bias(-1).layer) == 1
    np.testing.assert_array_equal(run.output_bias(1).values, w_o.bias_M)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit W_O"):
        contributions(np.zeros((2, 3, 16)), projection().w_o_HDM)
    assert contributions(np.zeros((4, 0, 16)), projection().w_o_HDM).shape == (4, 0, HIDDEN)


def test_w_o_of_another_run_is_refused_and_one_that_names_none_is_read(tmp_path) -> None:
    objects, shape = LocalStore(tmp_path), SampleShape()
    write_run(objects, shape, [[5]])
    write_output_projection(objects, projection(), "f" * 16)
    for call in (lambda run: run.contribution("p0", layer=1), lambda run: run.output_bias(1)):
        with pytest.raises(DamagedObject, match=f"belongs to run {'f' * 16}"):
            call(open_run(objects.url))
    name = weight_key(1)
    assert [problem.name for problem in verify_run(objects, deep=True).problems] == [name]
    data = objects.get(name, max_bytes=1 << 20)
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]["run_id"]
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    objects.put(name, [struct.pack("<Q", len(text)) + text + data[8 + length :]])
    assert open_run(objects.url).output_bias(1).shape == (HIDDEN,)
    assert verify_run(objects, deep=True).ok


@pytest.mark.parametrize("shape", [(8, 16, 64), (4, 8, 64), (4, 16, 32)])
def test_w_o_of_another_shape_than_the_models_is_refused(tmp_path, shape) -> None:
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), [[5]])
    write_output_projection(objects, OutputProjection(1, np.ones(shape, np.float32)), RUN_ID)
    for call in (lambda run: run.contribution("p0", layer=1), lambda run: run.output_bias(1)):
        with pytest.raises(FormatError, match="the model's layer 1 has"):
            call(open_run(objects.url))
