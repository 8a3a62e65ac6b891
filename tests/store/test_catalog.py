"""Many runs under one URL, and how two of the same prompts differ."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from store import catalog
from store.catalog import diff, open_catalog
from store.errors import RunError
from store.objects.fsspec_store import FsspecStore
from store.objects.local import LocalStore
from store.objects.obstore_store import ObstoreStore
from store.run import Run, open_run
from tests.store.sample_run import SampleShape, capture, sample_units, write_manifests, write_run

LENGTHS = [[40, 0, 7], [1, 30]]


@pytest.fixture
def folder(tmp_path):
    """The same values in float32 and rounded to bfloat16, and a run of other prompts."""
    for dtype in ("float32", "bfloat16"):
        objects, shape = LocalStore(tmp_path / "runs" / dtype), SampleShape(dtype=dtype)
        write_manifests(objects, shape, LENGTHS)
        for unit in sample_units(SampleShape(), LENGTHS):
            if dtype == "bfloat16":
                unit.arrays = {s: v.astype(ml_dtypes.bfloat16) for s, v in unit.arrays.items()}
            capture(objects, shape, unit)
    write_run(LocalStore(tmp_path / "runs" / "other" / "deep"), SampleShape(), [[9]])
    return tmp_path / "runs"


def test_lists_and_opens_runs(folder) -> None:
    runs = open_catalog(str(folder))
    assert list(runs) == ["bfloat16", "float32", "other/deep"]
    assert runs["other/deep"].read("z", prompt="p0").shape == (2, 4, 9, 16)
    table = runs.table().to_pylist()
    assert [row["stored"] for row in table] == [4, 4, 1]
    assert [row["dtype"] for row in table] == ["bfloat16", "float32", "float32"]
    assert "3 runs" in repr(runs)
    assert list(open_catalog(str(folder / "float32"))) == ["."]
    assert len(open_catalog(str(folder / "other" / "deep" / "plan"))) == 0


def test_links_to_runs_are_runs_and_links_inside_of_a_run_are_not(folder, tmp_path) -> None:
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen" / "alias").symlink_to(folder / "float32")
    (tmp_path / "chosen" / "nothing").symlink_to(tmp_path / "gone")
    assert open_catalog(str(tmp_path / "chosen"))["alias"].read("z", prompt="p0").sizes["pos"] == 40
    assert list(open_catalog(str(tmp_path / "chosen"))) == ["alias"]
    (folder / "bfloat16" / "inner").symlink_to(folder / "float32")
    assert list(open_catalog(str(folder / "bfloat16"))) == ["."]


@pytest.mark.parametrize("url", ["local", "memory", "fsspec"])
def test_the_inside_of_a_large_run_is_passed_over(url, tmp_path, monkeypatch) -> None:
    objects = {
        "local": lambda: LocalStore(tmp_path),
        "memory": lambda: ObstoreStore("memory://catalog/big"),
        "fsspec": lambda: FsspecStore("memory://catalog-big"),
    }[url]()
    monkeypatch.setattr(catalog, "SEEN_OF_A_RUN", 5)
    names = [f"{run}/run.json" for run in ("a-b", "a", "a0", "deep/a", "b/data/c")]
    for folder in ("a", "a-b", "deep/a", "plain", "plain/data/x"):
        names += [f"{folder}/{part}/{i}" for part in ("commits", "data") for i in range(20)]
    for name in names:
        objects.put(name, [b"{}"])
    listed = []

    class Watched:
        def __getattr__(self, name):
            return getattr(objects, name)

        def list(self, prefix, *, after=""):
            for info in objects.list(prefix, after=after):
                listed.append(info.name)
                yield info

    found = list(catalog._run_folders(Watched()))
    assert sorted(found) == ["a", "a-b", "a0", "b/data/c", "deep/a"]
    if url == "fsspec":
        assert len(listed) == len(names)
        return
    assert not [name for name in listed if name.startswith(("a/data", "a-b/data", "deep/a/data"))]
    assert len([name for name in listed if name.startswith("plain/")]) == 80


def test_a_run_at_the_root_is_one_run(tmp_path, monkeypatch) -> None:
    write_run(LocalStore(tmp_path), SampleShape(), [[4], [5]])
    for seen in (0, 1000):
        monkeypatch.setattr(catalog, "SEEN_OF_A_RUN", seen)
        assert list(open_catalog(str(tmp_path))) == ["."]


def test_diff_is_the_plain_difference(folder) -> None:
    first, second = (open_run(str(folder / name)) for name in ("float32", "bfloat16"))
    table = diff(first, second)
    assert table.num_rows == 4 * 2
    exact = np.concatenate([u.arrays["z"][1] for u in sample_units(SampleShape(), LENGTHS)])
    gap = np.abs(exact - exact.astype(ml_dtypes.bfloat16).astype(np.float32))
    row = next(r for r in table.to_pylist() if (r["site"], r["layer"]) == ("z", 1))
    assert row["max"] == pytest.approx(gap.max())
    assert row["mean"] == pytest.approx(gap.mean())
    assert row["scale"] == pytest.approx(np.abs(exact).max())
    assert row["rows"] == 78
    pattern = diff(first, second, ["pattern"], prompts=["p4"]).to_pylist()
    assert 0 < pattern[0]["max"] < 0.05
    assert pattern[0]["rows"] == 30
    same = diff(first, first)
    assert set(same["max"].to_pylist()) == {0.0}


def test_diff_refuses_rows_that_do_not_correspond(folder) -> None:
    first, other = open_run(str(folder / "float32")), open_run(str(folder / "other" / "deep"))
    with pytest.raises(RunError, match="other tokens"):
        diff(first, other)
    read = Run.read

    def other_heads(self, site, **choices):
        data = read(self, site, **choices)
        return data.assign_coords(head=data["head"] + 4) if self is second else data

    second = open_run(str(folder / "bfloat16"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "read", other_heads)
        with pytest.raises(RunError, match=r"has head 0\.\.3 in .* and 4\.\.7 in"):
            diff(first, second, ["z"])
    with pytest.raises(RunError, match="in common"):
        diff(first, other, [], prompts=[])
