"""Everything a run answers, against the arrays that were written. Two ranks, several units."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store import keys
from store.codec import Codec
from store.commit import commit_unit
from store.errors import (
    DamagedObject,
    PromptNotFound,
    PromptNotStored,
    RunNotFound,
    SelectionError,
    SiteNotFound,
)
from store.objects.local import LocalStore
from store.run import Run, open_run
from store.run_format import Commit, ModelManifest
from tests.store.sample_run import (
    SampleShape,
    SampleUnit,
    capture,
    make_unit,
    sample_units,
    write_manifests,
    write_run,
    write_unit,
)

LENGTHS = [[300, 0, 7], [1, 520, 33], [40]]
PENDING_UNIT = 2
KINDS = [("float32", Codec.RAW), ("bfloat16", Codec.RAW), ("bfloat16", Codec.SMALL)]

Truth = dict[str, dict[str, np.ndarray[Any, Any]]]


def shape_of(dtype: str = "float32", codec: Codec = Codec.RAW) -> SampleShape:
    return SampleShape(num_layers=3, dtype=dtype, codec=codec, ranks=2)


def truth_of(units: list[SampleUnit]) -> Truth:
    """prompt id -> site -> [L, H, T, D]"""
    found: Truth = {}
    for unit in units:
        row = 0
        for place, length in enumerate(unit.lengths):
            found[f"p{unit.first_prompt + place}"] = {
                site: values[:, row : row + length].swapaxes(1, 2)
                for site, values in unit.arrays.items()
            }
            row += length
    return found


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def sample(request, tmp_path_factory) -> tuple[Run, Truth]:
    folder = tmp_path_factory.mktemp("run")
    objects, shape = LocalStore(folder), shape_of(*request.param)
    units = sample_units(shape, LENGTHS)
    write_manifests(objects, shape, LENGTHS)
    for unit in units[:PENDING_UNIT]:
        capture(objects, shape, unit)
    return open_run(str(folder)), truth_of(units)


def choices(size: int) -> st.SearchStrategy[Any]:
    ints = st.integers(-size, size - 1)
    bounds = st.none() | st.integers(-size - 2, size + 2)
    steps = st.none() | st.integers(-3, 3).filter(bool)
    return st.none() | ints | st.lists(ints, max_size=5) | st.builds(slice, bounds, bounds, steps)


def take(values: np.ndarray[Any, Any], picks: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """Plain numpy's answer to a selection along each leading axis; scalars drop theirs."""
    scalar_axes = []
    for axis, pick in enumerate(picks):
        if pick is None:
            continue
        index = [pick] if isinstance(pick, int) else pick
        if isinstance(pick, int):
            scalar_axes.append(axis)
        places = np.arange(values.shape[axis])[index if index != [] else slice(0, 0)]
        values = np.take(values, places, axis=axis)
    return values.squeeze(axis=tuple(scalar_axes))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_selection_is_plain_numpys(sample: tuple[Run, Truth], data: st.DataObject) -> None:
    run, truth = sample
    prompt = data.draw(st.sampled_from(["p0", "p2", "p3", "p4", "p5"]))
    site = data.draw(st.sampled_from(["rot_q", "rot_k", "v", "z"]))
    whole = truth[prompt][site]
    picks = tuple(data.draw(choices(size)) for size in whole.shape[:3])
    layer, head, pos = picks
    for read in (run.read, run.isel):
        got = read(site, prompt=prompt, layer=layer, head=head, pos=pos)
        want = take(whole, picks)
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert got.values.tobytes() == np.ascontiguousarray(want).tobytes()


def test_dims_coordinates_and_tokens(sample: tuple[Run, Truth]) -> None:
    run, truth = sample
    got = run.read("z", prompt="p4", layer=[2, 0], head=3, pos=slice(510, 600))
    assert got.dims == ("layer", "pos", "d_head")
    assert got.layer.values.tolist() == [2, 0]
    assert int(got.coords["head"]) == 3
    assert got.pos.values.tolist() == list(range(510, 520))
    assert got.token.values.tolist() == [f"t{i}" for i in range(510, 520)]
    assert got.coords["prompt"].item() == "p4"
    assert run.read("v", prompt=4).dims == ("layer", "kv_head", "pos", "d_head")
    as_float = run.read("z", prompt=-3, layer=0, dtype="float32")
    assert as_float.dtype == np.float32
    np.testing.assert_array_equal(as_float.values, truth["p4"]["z"][0].astype(np.float32))


def test_z_is_pattern_times_v_head_by_head(tmp_path) -> None:
    shape = shape_of()
    objects, units = LocalStore(tmp_path), sample_units(shape, LENGTHS)
    share = shape.num_heads // shape.num_kv_heads
    for unit in units:
        row = 0
        for length in unit.lengths:
            rows = slice(row, row + length)
            q, k, v = (unit.arrays[s][:, rows].astype(float) for s in ("rot_q", "rot_k", "v"))
            for layer in range(shape.num_layers):
                for head in range(shape.num_heads):
                    weights = naive_pattern(q[layer, :, head], k[layer, :, head // share])
                    unit.arrays["z"][layer, rows, head] = weights @ v[layer, :, head // share]
            row += length
    write_manifests(objects, shape, LENGTHS)
    for unit in units:
        capture(objects, shape, unit)
    run = open_run(str(tmp_path))
    for prompt in ("p0", "p2", "p3", "p4", "p6"):
        pattern_LNQK = run.pattern(prompt).values
        v_LNTD = np.repeat(run.read("v", prompt=prompt).values, share, axis=1)
        z = run.read("z", prompt=prompt).values
        np.testing.assert_allclose(pattern_LNQK @ v_LNTD, z, atol=2e-6)


def naive_pattern(q_TD: np.ndarray[Any, Any], k_TD: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    tokens, size = q_TD.shape
    scores = q_TD @ k_TD.T / math.sqrt(size)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=0))
    weights[np.triu_indices(tokens, 1)] = 0
    return weights / weights.sum(axis=1, keepdims=True)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_parts_of_patterns_are_parts_of_the_whole(
    sample: tuple[Run, Truth], data: st.DataObject
) -> None:
    run, truth = sample
    q, k = (truth["p5"][site].astype(np.float64) for site in ("rot_q", "rot_k"))
    whole = np.stack([[naive_pattern(q[n, h], k[n, h // 2]) for h in range(4)] for n in range(3)])
    picks = tuple(data.draw(choices(size)) for size in whole.shape)
    layer, head, query, key = picks
    got = run.pattern("p5", layer, head, query=query, key=key)
    want = take(whole, picks)
    assert got.shape == want.shape
    np.testing.assert_allclose(got.values, want, atol=3e-6)
    scores = run.scores("p5", layer, head, query=query, key=key).values
    assert (np.isneginf(scores) == (want == 0)).all()


def test_transformer_lens_names_and_lazy_views(sample: tuple[Run, Truth]) -> None:
    run, _ = sample
    z = run.read("z", prompt="p2", layer=1, dtype="float32")
    for name in ("blocks.1.attn.hook_z", ("z", 1)):
        assert run.read(name, prompt="p2", dtype="float32").identical(z)
    lazy = run["blocks.1.attn.hook_z"]
    assert lazy.sel(prompt="p2", dtype="float32").identical(z)
    first = run["z"].isel(prompt="p2", layer=1, pos=slice(0, 2), dtype="float32")
    assert first.identical(z.isel(pos=slice(0, 2)))
    pattern = run.pattern("p2", 1, 2)
    assert run["blocks.1.attn.hook_pattern"].sel(prompt="p2", head=2).identical(pattern)
    assert run.read("blocks.1.attn.hook_attn_scores", prompt="p2", head=2).identical(
        run.scores("p2", 1, 2)
    )
    assert "kv_head: 2, pos: tokens, d_head: 16" in repr(run["v"])
    with pytest.raises(SiteNotFound, match="before the rotary embedding"):
        run.read("blocks.1.attn.hook_q", prompt="p2")
    with pytest.raises(SiteNotFound, match=r"layer 1, the selection 2"):
        run.read(("z", 1), prompt="p2", layer=2)
    for view in (run[("z", 1)], run["blocks.1.attn.hook_pattern"]):
        with pytest.raises(SiteNotFound, match=r"layer 1, the selection 2"):
            view.sel(prompt="p2", layer=2)
    with pytest.raises(TypeError, match="has no dimension query_pos"):
        run["z"].sel(prompt="p2", query_pos=1)
    with pytest.raises(TypeError, match="has no dimension heads; it has layer, head, pos, d_head"):
        run["z"].sel(prompt="p2", heads=1)
    with pytest.raises(TypeError, match="say which prompt"):
        run["z"].sel(head=1)


def test_places_count_what_is_held_and_a_named_layer_is_never_one(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    write_run(objects, replace(shape_of(), layer_numbers=(0, 2, 5)), [[6]])
    run = open_run(str(tmp_path))
    for site in ("z", "pattern", "scores"):
        by_label = run.read(site, prompt=0, layer=5, head=1)
        assert run.isel(site, prompt=0, layer=2, head=1).identical(by_label)
        assert run.isel((site, 5), prompt=0, head=1).identical(by_label)
        assert run[(site, 5)].isel(prompt=0, head=1).identical(by_label)
        assert run[site].isel(prompt=0, layer=-1, head=1).identical(by_label)
        assert by_label.coords["layer"].item() == 5
        with pytest.raises(SiteNotFound, match="nearest: 2 and 5"):
            run.read(site, prompt=0, layer=4)


def test_a_run_of_some_heads_answers_by_their_own_numbers(tmp_path) -> None:
    """Heads 4..7 of 8 and the kv heads 2 and 3 of 4 that they read."""
    objects, shape = LocalStore(tmp_path), shape_of()
    write_manifests(objects, shape, [[9, 5]])
    unit = make_unit(shape, 0, 0, [9, 5], 3)
    body = ModelManifest.from_bytes(
        objects.get(keys.MODEL, max_bytes=1 << 20), keys.MODEL
    ).model_dump()
    for layer in body["layers"]:
        layer |= {"num_heads": 8, "num_kv_heads": 4}
    model = ModelManifest.model_validate(body)
    objects.put(keys.MODEL, [model.to_bytes()])
    commit = write_unit(objects, shape, unit, "a0").model_dump()
    for array in commit["arrays"]:
        array["heads"] = [2, 3] if array["site"] in ("rot_k", "v") else [4, 5, 6, 7]
        commit["ranks"][0]["heads"][array["site"]] = array["heads"]
    commit["model_crc32c"] = model.fingerprint
    assert commit_unit(objects, Commit.model_validate(commit)).won
    run = open_run(str(tmp_path))
    z = run.read("z", prompt=1, layer=0)
    assert z.coords["head"].values.tolist() == [4, 5, 6, 7]
    assert run.read("z", prompt=1, layer=0, head=6).equals(z.sel(head=6))
    assert run.isel("v", prompt=1, layer=0, head=-1).coords["kv_head"].item() == 3
    with pytest.raises(SiteNotFound, match=r"head 3 is not there; nearest: 4 and 5; held: 4\.\.7"):
        run.read("z", prompt=1, head=3)
    q, k = (unit.arrays[site][1, 9:].swapaxes(0, 1) for site in ("rot_q", "rot_k"))
    want = naive_pattern(q[2], k[1])
    np.testing.assert_allclose(run.pattern(1, 1, 6).values, want, atol=2e-6)
    scores = run.head_scores("previous_token", prompts=[1])
    assert scores.coords["head"].values.tolist() == [4, 5, 6, 7]
    np.testing.assert_allclose(scores.sel(layer=1, head=6), np.diagonal(want, -1).mean(), atol=1e-6)
    part = run.head_scores("previous_token", prompts=[1], heads=[7, 6], layers=1)
    np.testing.assert_allclose(part.sel(head=6), scores.sel(layer=1, head=6), atol=1e-6)
    (batch,) = run.batches(["z", "v"], prompts=[1], heads=None)
    assert batch.heads == {"z": (4, 5, 6, 7), "v": (2, 3)}
    assert run.cache(1)["z", 0].shape == (1, 5, 4, 16)


def test_errors_name_the_nearest_and_say_the_state(sample: tuple[Run, Truth]) -> None:
    run, _ = sample
    with pytest.raises(SiteNotFound, match="did you mean rot_q"):
        run.read("rotq", prompt="p0")
    with pytest.raises(SiteNotFound, match="layer 3 is not there; nearest: 1 and 2"):
        run.read("z", prompt="p0", layer=3)
    with pytest.raises(SiteNotFound, match="which several query heads share"):
        run.read("rot_k", prompt="p0", head=3)
    with pytest.raises(SelectionError, match="pos 7 is not there"):
        run.read("z", prompt="p2", pos=7)
    with pytest.raises(PromptNotFound, match="nearest: 'p4'"):
        run.read("z", prompt="p4x")
    with pytest.raises(PromptNotFound, match=r"rows 0..6"):
        run.read("z", prompt=7)
    with pytest.raises(PromptNotStored, match="'p1' failed: empty prompt"):
        run.read("z", prompt="p1")
    with pytest.raises(PromptNotStored, match=r"pending: its unit 2 is not committed \(2 of 3"):
        run.pattern("p6", 0, 0)


@pytest.mark.parametrize("id_", ["\ud800", b"p0\xff".decode(errors="surrogateescape")])
def test_half_a_surrogate_pair_names_no_prompt(sample: tuple[Run, Truth], id_: str) -> None:
    run, _ = sample
    for call in (
        lambda: run.read("z", prompt=id_),
        lambda: run.pattern(id_),
        lambda: run.tokens(id_),
        lambda: run.batches(["z"], prompts=["p0", id_]),
        lambda: run.moments("z", prompts=[id_]),
    ):
        with pytest.raises(PromptNotFound, match=r"there is no prompt '.*\\ud"):
            call()


def test_the_prompts_table_and_tokens(sample: tuple[Run, Truth]) -> None:
    run, _ = sample
    table = run.prompts
    assert table.column_names == ["prompt_id", "num_tokens", "status", "reason", "text", "split"]
    assert table["status"].to_pylist() == ["stored", "failed", *["stored"] * 4, "pending"]
    assert table["reason"].to_pylist()[1] == "empty prompt"
    tokens = run.tokens("p2")
    assert tokens.ids.tolist() == list(range(7))
    assert tokens.strings[:2] == ("t0", "t1")
    assert len(run.tokens("p6")) == 40


def test_repr_says_what_is_there(sample: tuple[Run, Truth]) -> None:
    run, _ = sample
    text = repr(run)
    assert "5 of 7 stored (1 failed, 1 pending)" in text
    assert "2 of 3 committed" in text
    assert "rot_q, rot_k, v, z" in text
    assert "4 heads over 2 kv heads, d_head 16" in text
    assert run.url in run._repr_html_()


@pytest.mark.parametrize(
    ("heads", "shown"),
    [
        ([3, 1], "the groups of heads 1, 3 of 4 heads over"),
        (None, "x 4 heads"),
        ("all", "x 4 heads"),
    ],
)
def test_repr_says_which_heads_were_chosen(sample, monkeypatch, heads, shown) -> None:
    run, _ = sample
    monkeypatch.setitem(run.config, "capture", {"heads": heads})
    assert shown in repr(run)


def test_repr_says_which_layers_have_no_attention(sample, monkeypatch) -> None:
    run, _ = sample
    assert "without attention" not in repr(run)
    bare = {"layers_without_attention": {"conv": [3, 5], "mlp": [4]}}
    monkeypatch.setattr(run, "_manifest", run._manifest.model_copy(update=bare))
    assert "layers   0..2 x 4 heads over" in repr(run)
    assert "; without attention: 3, 5 (conv), 4 (mlp)" in repr(run)


def test_a_view_reads_nothing_until_it_is_asked(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    write_manifests(objects, shape_of(), [[6]])
    capture(objects, shape_of(), make_unit(shape_of(), 0, 0, [6], 3))
    for file in (tmp_path / "data").rglob("c/*"):
        if file.is_dir():
            shutil.rmtree(file)
    run = open_run(str(tmp_path))
    assert "one prompt: (layer: 0..2, head: 4, pos: tokens, d_head: 16)" in repr(run["z"])
    assert run["blocks.1.attn.hook_pattern"].dims == ("head", "query_pos", "key_pos")
    assert run.explain("z", prompt=0).requests > 0
    with pytest.raises(DamagedObject):
        run["z"].sel(prompt=0)


def test_refresh_sees_what_was_committed_since(tmp_path) -> None:
    objects, shape = LocalStore(tmp_path), shape_of()
    units = sample_units(shape, LENGTHS)
    write_manifests(objects, shape, LENGTHS)
    run = open_run(str(tmp_path))
    assert run.prompts["status"].to_pylist() == ["pending"] * 7
    for unit in units:
        capture(objects, shape, unit)
    with pytest.raises(PromptNotStored):
        run.read("z", prompt="p6")
    assert run.refresh().read("z", prompt="p6").shape == (3, 4, 40, 16)


def test_no_run_here(tmp_path) -> None:
    with pytest.raises(RunNotFound, match="there is no run"):
        open_run(str(tmp_path))


def _shard(folder, site: str = "z") -> Any:
    return folder / keys.attempt_prefix(0, "a0") / f"{site}/c/1/0/0/0"


@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_damage_raises_and_is_never_zeros(tmp_path, damage: str) -> None:
    objects, shape = LocalStore(tmp_path), shape_of()
    write_manifests(objects, shape, LENGTHS)
    capture(objects, shape, sample_units(shape, LENGTHS)[0])
    path = _shard(tmp_path)
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "short":
        path.write_bytes(data[: len(data) // 3])
    elif damage == "flipped":
        data[len(data) // 5] ^= 16
        path.write_bytes(data)
    run = open_run(str(tmp_path))
    with pytest.raises(DamagedObject, match="z/c/1/0/0/0"):
        run.read("z", prompt="p0")
    assert run.read("z", prompt="p0", layer=0).shape == (4, 300, 16)
