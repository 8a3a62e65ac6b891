"""Only the chosen heads of a real engine are stored, under their own numbers, on one rank and two.

The model has 16 query heads over 8 KV heads, so a group is two heads.
"""

from __future__ import annotations

import numpy as np
import pytest
import zarr

from jobs.config_file import parse_config
from jobs.estimate import Rates, estimate
from jobs.model_identity import attention_shape
from store.errors import SiteNotFound
from store.packed_pattern import entry_starts
from tests.capture.comparison import assert_close, assert_stored_patterns
from tests.capture.conftest import EVERYTHING, SMALL_STEPS
from tests.capture.hf_reference import HFReference
from tests.capture.live_capture import Captured, LiveCapture, capture_live
from tests.conftest import MODELS

pytestmark = pytest.mark.engine

WANTED = [1, 12, 9]
HELD = {
    1: ([0, 1, 8, 9, 12, 13], [0, 4, 6]),
    # The first rank is filled up to two groups.
    2: ([0, 1, 2, 3, 8, 9, 12, 13], [0, 1, 4, 6]),
}


@pytest.fixture(scope="module")
def model():
    from capture.checkpoints.tiny import tiny_qwen3

    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    return tiny_qwen3(MODELS / "tiny-qwen3-16-heads", **heads)


@pytest.fixture(scope="module")
def reference(model):
    reference = HFReference(str(model))
    yield reference
    reference.close()


@pytest.fixture(scope="module", params=[1, 2])
def captured(request, tmp_path_factory, model, tiny_units) -> Captured:
    ranks = request.param
    engine = {**SMALL_STEPS, "tensor_parallel_size": ranks}
    capture = {**EVERYTHING, "heads": WANTED, "layers": [0, 2]}
    if ranks == 2:
        capture["pattern"] = "float32"
    folder = str(tmp_path_factory.mktemp(f"heads-{ranks}") / "run")
    return capture_live(
        [LiveCapture(folder, str(model), tiny_units, engine, capture, self_check=ranks == 1)]
    )[0]


@pytest.fixture
def held(captured) -> tuple[list[int], list[int]]:
    return HELD[captured.wanted.engine["tensor_parallel_size"]]


def test_the_held_heads_are_stored_under_their_numbers(captured, held, reference) -> None:
    run = captured.run
    assert [result["status"] for result in captured.results] == ["committed"] * len(
        captured.results
    )
    for number, prompt in enumerate(run.prompts["prompt_id"].to_pylist()):
        layers = reference.layers(captured.wanted.ids(number))
        for site in run.sites:
            read = run.read(site, prompt=prompt, dtype=np.float32)
            is_kv = "kv_head" in read.dims
            assert read.coords[read.dims[1]].values.tolist() == held[is_kv]
            if layers[0].site(site) is not None:
                want = np.stack([layers[layer].site(site)[held[is_kv]] for layer in (0, 2)])
                assert_close(f"{site} of {prompt}", read.values, want, 1e-3)
        want = np.stack([layers[layer].site("pattern")[held[0]] for layer in (0, 2)])
        assert_close(f"pattern of {prompt}", run.pattern(prompt).values, want, 1e-3)
        if "pattern" in captured.wanted.capture:
            assert_stored_patterns(run, prompt, 1e-6)
        one = run.pattern(prompt, layer=2, head=12).values
        assert np.allclose(one, run.pattern(prompt).sel(layer=2, head=12).values, atol=1e-6)


def test_a_head_that_is_not_held_is_refused_with_those_that_are(captured) -> None:
    run = captured.run
    with pytest.raises(SiteNotFound, match="head 10 is not there; nearest: 8 and 9; held: "):
        run.read("z", prompt="p0", layer=0, head=10)
    with pytest.raises(SiteNotFound, match="head 10 is not there; nearest: 8 and 9; held: "):
        run.pattern("p0", layer=0, head=10)
    with pytest.raises(SiteNotFound, match="kv_head 5 is not there"):
        run.read("v", prompt="p0", head=5)


def test_contributions_take_the_held_heads_own_part_of_the_output(captured, held) -> None:
    run = captured.run
    z_HPD = run.read("z", prompt="p0", layer=2, dtype=np.float32).values
    w_o_HDM = run._output_projection(2).w_o_HDM.astype(np.float32)
    assert len(w_o_HDM) == 16
    want = np.einsum("hpd,hdm->hpm", z_HPD, w_o_HDM[held[0]])
    assert np.allclose(run.contribution("p0", 2).values, want, rtol=1e-4, atol=1e-5)


def test_the_run_says_that_it_holds_some_heads_only(captured) -> None:
    assert "the groups of heads 1, 9, 12 of 16 heads over 8 kv heads" in repr(captured.run)


def test_other_libraries_find_the_heads_in_the_arrays_attributes(captured, held) -> None:
    group = zarr.open_group(f"{captured.wanted.out}/data/00000000/a0", mode="r")
    assert group["z"].attrs["heads"] == held[0]
    assert group["rot_k"].attrs["heads"] == held[1]
    assert group["rot_k"].attrs["layers"] == [0, 2]
    assert group["z"].shape[2] == len(held[0])


def test_every_rank_writes_equally_many_and_a_dry_run_knows_the_bytes(captured, model) -> None:
    ranks = captured.wanted.engine["tensor_parallel_size"]
    sites = captured.wanted.capture["sites"]
    stored_pattern = {"pattern": "stored", "pattern_dtype": "float32"} if ranks == 2 else {}
    config = parse_config(
        {
            "output": "unused",
            "prompts": {"source": "unused"},
            "model": {"path": str(model), "dtype": "float32"},
            "capture": {"heads": WANTED, "layers": [0, 2], "sites": sites, **stored_pattern},
            "engine": {"tensor_parallel_size": ranks},
        }
    )
    tokens = [sum(map(len, unit)) for unit in captured.wanted.units]
    rows = [np.array([len(ids) for ids in unit]) for unit in captured.wanted.units]
    expected = estimate(
        config,
        attention_shape(config.model),
        tokens,
        unit_entries=[int(entry_starts(lengths)[-1]) for lengths in rows],
        prompts=0,
        unusable=0,
        rates=Rates(),
    )
    stored = dict.fromkeys([*sites, *(["pattern"] if stored_pattern else [])], 0)
    for unit in range(len(tokens)):
        commit = captured.run._index.commit(unit)
        assert {len(rank.heads["z"]) for rank in commit.ranks} == {6 if ranks == 1 else 4}
        for record in commit.objects:
            site, _, rest = record.name.partition("/")
            if rest and rest != "zarr.json":
                stored[site] += record.bytes
    assert expected.site_bytes == stored


def test_the_self_check_compares_the_held_heads_alone(captured) -> None:
    if captured.checks:
        figures, planted = captured.checks
        assert figures["mixed"] < 1e-3
        assert figures["reference"] < 1e-3
        assert "layer 1" not in figures["reference_at"]
        assert planted == "it passed", "layer 1, whose scale was made wrong, is not stored"
