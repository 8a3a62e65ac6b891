"""The second way in: other Zarr libraries open any unit's group and read equal bytes."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorstore as ts
import xarray as xr
import zarr

import store.zarr_bfloat16
from store import keys
from store.codec import Codec
from store.objects.local import LocalStore
from store.objects.obstore_store import ObstoreStore
from tests.store.sample_run import SampleShape, make_unit, write_unit

DTYPES = ["bfloat16", "float16", "float32"]
PREFIX = keys.attempt_prefix(0, "a0")


def _written(objects, dtype, codec, ranks=1):
    shape = SampleShape(dtype=dtype, codec=codec, num_heads=8, num_kv_heads=2, ranks=ranks)
    sample = make_unit(shape, 0, 0, [300, 7, 520], seed=5)
    write_unit(objects, shape, sample, "a0")
    return sample.arrays


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensorstore(tmp_path, dtype, codec):
    for site, truth in _written(LocalStore(tmp_path), dtype, codec, ranks=2).items():
        path = f"{tmp_path}/{PREFIX}{site}"
        array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}).result()
        assert array.domain.labels == ("layer", "token", array.domain.labels[2], "d_head")
        assert array.domain.labels[2] == ("kv_head" if site in ("rot_k", "v") else "head")
        assert np.ascontiguousarray(array.read().result()).tobytes() == truth.tobytes()
        part = np.asarray(array[1, 255:310, 1].read().result())
        assert part.tobytes() == truth[1, 255:310, 1].tobytes()


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("dtype", DTYPES)
def test_zarrs(tmp_path, dtype, codec):
    arrays = _written(LocalStore(tmp_path), dtype, codec, ranks=2)
    with zarr.config.set(
        {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True}
    ):
        for site, truth in arrays.items():
            folder = tmp_path / PREFIX / site
            if dtype == "bfloat16":
                # zarrs knows bfloat16, its Python binding refuses numpy types of ml_dtypes: bits.
                metadata = json.loads((folder / "zarr.json").read_text())
                metadata |= {"data_type": "uint16", "fill_value": 0}
                (folder / "zarr.json").write_text(json.dumps(metadata))
            array = zarr.open_array(folder, mode="r")
            assert type(array._async_array.codec_pipeline).__module__.startswith("zarrs")
            assert np.asarray(array[:]).tobytes() == truth.tobytes()


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("dtype", DTYPES)
def test_xarray(tmp_path, dtype, codec):
    arrays = _written(LocalStore(tmp_path), dtype, codec)
    data = xr.open_zarr(tmp_path / PREFIX, consolidated=False, mask_and_scale=False, chunks=None)
    assert dict(data.sizes) == {"layer": 2, "token": 827, "head": 8, "kv_head": 2, "d_head": 16}
    for site, truth in arrays.items():
        assert data[site].values.tobytes() == truth.tobytes()


def test_zarr_python_over_object_storage():
    objects = ObstoreStore("memory://interop")
    arrays = _written(objects, "bfloat16", Codec.SMALL)
    group = zarr.open_group(
        zarr.storage.ObjectStore(objects._open(), read_only=True), path=PREFIX[:-1], mode="r"
    )
    assert set(group.array_keys()) == set(arrays)
    assert group["rot_q"][:].tobytes() == arrays["rot_q"].tobytes()


def test_values_that_are_no_numbers_survive(tmp_path):
    shape = SampleShape(dtype="bfloat16")
    sample = make_unit(shape, 0, 0, [300], seed=5)
    bits = np.random.default_rng(0).integers(0, 1 << 16, sample.arrays["z"].shape, np.uint16)
    sample.arrays["z"] = bits.view(sample.arrays["z"].dtype)
    write_unit(LocalStore(tmp_path), shape, sample, "a0")
    found = zarr.open_array(tmp_path / PREFIX / "z", mode="r")[:]
    assert np.array_equal(found.view(np.uint16), bits)


def test_the_bfloat16_type_follows_the_registry():
    kind = store.zarr_bfloat16.BFloat16
    store.zarr_bfloat16.register()
    for value in (0.5, np.inf, -np.inf, np.nan):
        written = kind().to_json_scalar(value, zarr_format=3)
        read = float(kind().from_json_scalar(written, zarr_format=3))
        assert read == value or (np.isnan(read) and np.isnan(value))
    assert np.isnan(float(kind().from_json_scalar("0x7fc0", zarr_format=3)))
    assert kind().to_json(3) == "bfloat16"
    with pytest.raises(ValueError, match="not bfloat16"):
        kind.from_native_dtype(np.dtype(np.float32))


def test_importing_store_is_enough_for_bfloat16(tmp_path):
    _written(LocalStore(tmp_path), "bfloat16", Codec.RAW)
    script = (
        "import store.zarr_bfloat16, zarr, sys;"
        "print(zarr.open_array(sys.argv[1], mode='r')[0, 0, 0, :2].dtype)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / PREFIX / "z")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "bfloat16", done.stderr
