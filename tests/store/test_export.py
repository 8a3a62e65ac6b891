"""Exports hold the run's own values, read back by each format's own library."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest

from store.errors import ExportRefused, PromptNotStored
from store.export import ExportKind, ExportSelection, export
from store.objects.local import LocalStore
from store.run import Run, open_run
from tests.store.sample_run import SampleShape, write_run

LENGTHS = [[40, 0, 7], [1, 300]]
STORED = ["p0", "p2", "p3", "p4"]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def run(request, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("exported")
    write_run(LocalStore(folder), SampleShape(dtype=request.param), LENGTHS)
    return open_run(str(folder))


def exact(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32)


@pytest.mark.parametrize("kind", list(ExportKind))
def test_every_kind_has_the_prompts_and_is_made_once(run: Run, tmp_path, kind: ExportKind) -> None:
    report = export(run, kind, tmp_path / "out", ExportSelection(sites=["z"]))
    assert report.prompts == 4
    assert report.bytes > 0
    table = pq.read_table(tmp_path / "out" / "prompts.parquet")
    assert table["prompt_id"].to_pylist() == STORED
    assert table["split"].to_pylist() == ["train", "train", "test", "train"]
    body = json.loads((tmp_path / "out" / "export.json").read_text())
    assert body == {"kind": kind.value, "run": run.id, "sites": ["z"], "prompts": 4}
    with pytest.raises(ExportRefused, match="export to a new folder"):
        export(run, kind, tmp_path / "out")


def test_numpy(run: Run, tmp_path) -> None:
    chosen = ExportSelection(sites=["v", "pattern"], prompts=["p4", "p2"], layers=1, heads=[1])
    export(run, "numpy", tmp_path / "out", chosen)
    held = np.load(tmp_path / "out" / "prompt-00000000.npz")
    assert held["token_ids"].tolist() == list(range(300))
    np.testing.assert_array_equal(
        held["v"], exact(run.read("v", prompt="p4", layer=[1], head=[1]).values)
    )
    np.testing.assert_array_equal(held["pattern"], run.pattern("p4", [1], [1]).values)


def test_safetensors_keep_their_bits(run: Run, tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    export(run, "safetensors", tmp_path / "out")
    for number, prompt in enumerate(STORED):
        file = tmp_path / "out" / f"prompt-{number:08d}.safetensors"
        held = safetensors.load_file(file)
        for site in run.sites:
            want = run.read(site, prompt=prompt)
            bits = held[site].view(dtype=__import__("torch").uint8).numpy()
            assert bits.tobytes() == want.values.tobytes()
            assert held[site].shape == want.shape
        assert held["token_ids"].tolist() == run.tokens(prompt).ids.tolist()


@pytest.mark.parametrize("kind", ["zarr", "icechunk"])
def test_zarr_and_icechunk(run: Run, tmp_path, kind: str) -> None:
    zarr = pytest.importorskip("zarr")
    export(run, kind, tmp_path / "out", ExportSelection(pos=slice(0, 5)))
    if kind == "zarr":
        group = zarr.open_group(tmp_path / "out" / "data.zarr", mode="r")
    else:
        icechunk = pytest.importorskip("icechunk")
        storage = icechunk.local_filesystem_storage(str(tmp_path / "out" / "data.icechunk"))
        session = icechunk.Repository.open(storage).readonly_session("main")
        group = zarr.open_group(session.store, mode="r")
    prompts, pos = group["prompt"][:], group["pos"][:]
    assert prompts.tolist() == [0] * 5 + [1] * 5 + [2] + [3] * 5
    assert pos.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4]
    for site in run.sites:
        held = group[site][:]
        assert group[site].metadata.dimension_names[1] == "row"
        for number, prompt in enumerate(STORED):
            want = run.read(site, prompt=prompt, pos=slice(0, 5)).values.swapaxes(1, 2)
            got = np.ascontiguousarray(held[:, prompts == number])
            assert got.dtype == want.dtype
            assert got.tobytes() == np.ascontiguousarray(want).tobytes()


def test_hf_dataset(run: Run, tmp_path, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    export(run, "hf-dataset", tmp_path / "out", ExportSelection(sites=["z"], layers=[1]))
    held = datasets.load_dataset(
        str(tmp_path / "out" / "dataset"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert held["prompt_id"][:] == STORED
    for row, prompt in zip(held, STORED, strict=True):
        want = exact(run.read("z", prompt=prompt, layer=[1]).values)
        np.testing.assert_array_equal(np.asarray(row["z"], np.float32), want)
        assert row["tokens"] == list(run.tokens(prompt).strings)


def test_refusals(run: Run, tmp_path) -> None:
    with pytest.raises(ValueError, match="there are numpy, safetensors, zarr"):
        export(run, "csv", tmp_path / "out")
    with pytest.raises(PromptNotStored, match="empty prompt"):
        export(run, "numpy", tmp_path / "out", ExportSelection(prompts=["p1"]))
    assert not (tmp_path / "out" / "export.json").exists()
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2
