"""What an export has no place for is refused with why, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store import export as exporting
from store.errors import ExportRefused, PromptNotStored, RunError, SiteNotFound
from store.export import ExportKind, ExportSelection, export
from store.new_folder import new_folder
from store.objects.local import LocalStore
from store.run import Run, open_run
from tests.store.sample_run import SampleShape, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("refused")
    write_run(LocalStore(folder), SampleShape(), [[5, 0, 3]])
    return open_run(str(folder))


@pytest.mark.parametrize("kind", ["zarr", "icechunk"])
@pytest.mark.parametrize(
    ("sites", "why"),
    [
        (["pattern"], "holds one row a token, which pattern is not"),
        (["scores"], "holds one row a token, which scores is not"),
        (["z", "pattern"], "holds one row a token, which pattern is not"),
        (["hook_pattern"], "holds one row a token, which pattern is not"),
        (["blocks.0.attn.hook_z"], "names one layer, and .* holds whole sites; give 'z'"),
    ],
)
def test_what_has_no_rows_has_no_place_in_zarr(
    run: Run, tmp_path: Path, kind: str, sites: list[str], why: str
) -> None:
    with pytest.raises(ExportRefused, match=why):
        export(run, kind, tmp_path / "out", ExportSelection(sites=sites))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["numpy", "safetensors", "hf-dataset"])
def test_the_others_take_patterns_and_hook_names(run: Run, tmp_path: Path, kind: str) -> None:
    chosen = ExportSelection(sites=["z", "pattern", "blocks.0.attn.hook_v"])
    assert export(run, kind, tmp_path / "out", chosen).prompts == 2


@pytest.mark.parametrize("dtype", ["complex64", "U4", "no such type", "datetime64[s]", object()])
@pytest.mark.parametrize("kind", list(ExportKind))
def test_a_type_that_has_no_place(run: Run, tmp_path: Path, kind: str, dtype: Any) -> None:
    with pytest.raises(ExportRefused, match="dtype"):
        export(run, kind, tmp_path / "out", ExportSelection(sites=["z"], dtype=dtype))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "uint16", "uint32", "uint64", "bool", "float16"]
)
def test_safetensors_hold_every_plain_type(run: Run, tmp_path: Path, dtype: str) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    chosen = ExportSelection(sites=["pattern"], dtype=dtype)
    export(run, "safetensors", tmp_path / "out", chosen)
    held = safetensors.load_file(tmp_path / "out" / "prompt-00000000.safetensors")["pattern"]
    assert held.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(held, run.pattern(0).values.astype(dtype))


def test_longdouble_has_no_place_in_safetensors(run: Run, tmp_path: Path) -> None:
    chosen = ExportSelection(sites=["z"], dtype=np.longdouble)
    with pytest.raises(ExportRefused, match=r"has no dtype float\d+; it has bfloat16"):
        export(run, "safetensors", tmp_path / "out", chosen)


@pytest.mark.parametrize("kind", list(ExportKind))
@pytest.mark.parametrize(
    ("chosen", "error"),
    [
        (ExportSelection(sites=["nothing"]), SiteNotFound),
        (ExportSelection(sites="z"), ExportRefused),
        (ExportSelection(sites=["z"], layers=9), SiteNotFound),
        (ExportSelection(sites=["z"], layers=True), TypeError),
        (ExportSelection(sites=["z"], pos=[0, 4]), RunError),
        (ExportSelection(sites=["z"], prompts=["p0", "p1"]), PromptNotStored),
    ],
)
def test_a_refused_export_leaves_nothing(
    run: Run, tmp_path: Path, kind: str, chosen: ExportSelection, error: type[Exception]
) -> None:
    with pytest.raises(error):
        export(run, kind, tmp_path / "out", chosen)
    assert not (tmp_path / "out").exists()
    assert export(run, kind, tmp_path / "out", ExportSelection(sites=["z"])).prompts == 2


def test_more_values_than_a_row_of_a_dataset_can_count_are_refused(
    run: Run, tmp_path: Path, monkeypatch
) -> None:
    with pytest.raises(ExportRefused, match=r"2147483648 values, and a row .* takes 2147483647"):
        exporting.nested_row(np.broadcast_to(np.float32(0), (1 << 11, 1 << 10, 1 << 10)))
    monkeypatch.setattr(exporting, "MAX_ROW_VALUES", 100)
    with pytest.raises(ExportRefused, match="pick fewer layers, heads or positions"):
        export(run, "hf-dataset", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_export_leaves_nothing_and_takes_nothing_else(
    run: Run, tmp_path: Path, monkeypatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(exporting.pq, "write_table", broken)
    with pytest.raises(OSError, match="disk is full"):
        export(run, "numpy", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept").write_text("kept")
    with pytest.raises(ExportRefused, match="already there"):
        export(run, "numpy", tmp_path / "mine")
    assert (tmp_path / "mine" / "kept").read_text() == "kept"


@pytest.mark.parametrize("kind", list(ExportKind))
def test_a_broken_export_takes_the_parents_that_it_made(
    run: Run, tmp_path: Path, kind: str, monkeypatch
) -> None:
    (tmp_path / "mine").mkdir()
    chosen = ExportSelection(sites=["z"], prompts=["p0", "p1"])
    with pytest.raises(PromptNotStored):
        export(run, kind, tmp_path / "mine" / "a" / "b" / "out", chosen)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    monkeypatch.chdir(tmp_path / "mine")
    with pytest.raises(PromptNotStored):
        export(run, kind, "a/out", chosen)
    with pytest.raises(PromptNotStored):
        export(run, kind, "../other/../mine/a/out", chosen)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_parents_that_another_filled_meanwhile_stay(run: Run, tmp_path: Path, monkeypatch) -> None:
    def broken(*_: Any) -> None:
        (tmp_path / "a" / "theirs").write_text("kept")
        raise OSError("the disk is full")

    monkeypatch.setattr(exporting.pq, "write_table", broken)
    with pytest.raises(OSError, match="disk is full"):
        export(run, "numpy", tmp_path / "a" / "b" / "out")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "theirs"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("file/out", "Not a directory"),
        ("a/b/" + "n" * 300 + "/out", "too long"),
        ("a/b/" + "n" * 300, "too long"),
    ],
)
def test_a_path_that_cannot_be_made_leaves_nothing(
    run: Run, tmp_path: Path, path: str, why: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=why):
        export(run, "numpy", tmp_path / path)
    with pytest.raises(ExportRefused, match="already there"):
        export(run, "numpy", tmp_path / "file")
    with pytest.raises(OSError, match="too long"), new_folder(tmp_path / "a" / "b" / "c"):
        (tmp_path / "a" / "b" / "c" / ("n" * 300)).mkdir()
    assert list(tmp_path.rglob("*")) == [tmp_path / "file"]
