"""Names that mean something to a reader are free for nobody, and old runs that hold one say so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

from store.errors import ExportRefused, SiteNotFound
from store.export import ExportKind, ExportSelection, export
from store.objects.local import LocalStore
from store.run import Run, open_run
from store.run_format import Site
from store.site_names import EXPORT_NAMES, RESERVED, is_free
from tests.store.sample_run import SampleShape, write_run

TAKEN = ("scores", "hook_z", "token_ids", "file", "prompt", "tokens", "status")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of before such names were refused."""
    folder = tmp_path_factory.mktemp("old-names")
    shape = SampleShape(sites=("rot_q", "rot_k", "v", "z", *TAKEN))
    write_run(LocalStore(folder), shape, [[5, 3]])
    return open_run(str(folder))


@pytest.mark.parametrize("name", [*TAKEN, *Site, "q", "k", "attn_scores", "hook_mine", "pos"])
def test_names_of_a_meaning_are_not_free(name: str) -> None:
    assert not is_free(name)


@pytest.mark.parametrize("name", ["z_norm", "last_row_entropy", "mine", "zz", "scores_of_probe"])
def test_other_names_are_free(name: str) -> None:
    assert is_free(name)


def test_every_label_of_the_arrays_that_are_read_is_taken(old: Run) -> None:
    for array in (old.read("z", prompt="p0"), old.read("v", prompt="p0"), old.pattern("p0")):
        assert {*map(str, array.dims), *map(str, array.coords)} <= RESERVED
    first = old.prompts.column_names[:5]
    assert first == ["prompt_id", "num_tokens", "status", "reason", "text"]
    assert set(first) <= RESERVED


def test_every_argument_of_savez_is_taken() -> None:
    named = {
        name
        for name, parameter in inspect.signature(np.savez).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    assert named <= EXPORT_NAMES["numpy"]
    assert set(EXPORT_NAMES) == {kind.value for kind in ExportKind}


@pytest.mark.parametrize("name", ["scores", "hook_z"])
def test_a_site_of_an_old_run_is_never_answered_with_another(old: Run, name: str) -> None:
    with pytest.raises(SiteNotFound, match=f"probe is called '{name}'"):
        old.read(name, prompt="p0")
    with pytest.raises(SiteNotFound, match="means something else"):
        old[name]
    with pytest.raises(SiteNotFound, match="means something else"):
        old.read((name, 0), prompt="p0")


def test_attention_scores_of_an_old_run_are_still_read(old: Run) -> None:
    scores = old.scores("p0")
    assert scores.dims == ("layer", "head", "query_pos", "key_pos")
    same = old.read("hook_attn_scores", prompt="p0")
    np.testing.assert_array_equal(same.values, scores.values)
    assert old.pattern("p0").sizes["key_pos"] == 5


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("numpy", "token_ids"),
        ("numpy", "file"),
        ("safetensors", "token_ids"),
        ("zarr", "prompt"),
        ("icechunk", "prompt"),
        ("hf-dataset", "tokens"),
        ("hf-dataset", "status"),
    ],
)
def test_an_export_that_would_replace_something_is_refused_by_name(
    old: Run, tmp_path: Path, kind: str, name: str
) -> None:
    with pytest.raises(ExportRefused, match=re.escape(f"cannot hold the site '{name}'")):
        export(old, kind, tmp_path / "out", ExportSelection(sites=["z", name]))
    assert not (tmp_path / "out").exists()
    assert export(old, kind, tmp_path / "out", ExportSelection(sites=["z"])).prompts == 2
