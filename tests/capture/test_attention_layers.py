"""What each layer computes is read from vLLM's own modules, never guessed; no engine is started.

The modules are vLLM's classes without their construction, with the fields that vLLM gives them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capture.attention_layers import (
    LocalLayer,
    find_attention_layers,
    local_semantics,
    merge_semantics,
    refuse_shared_sites,
)
from capture.errors import CaptureError, UnsupportedModel
from capture.layer_kinds import LayerKinds
from capture.settings import CaptureSettings
from tests.capture.random_engine import RandomEngine

FIELDS = {
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 32,
    "head_size_v": 32,
    "sliding_window": None,
}


def attention(kind: type | None = None, impl: dict[str, Any] | None = None, **fields: Any) -> Any:
    from vllm.model_executor.layers.attention import Attention

    made = torch.nn.Module.__new__(kind or Attention)
    torch.nn.Module.__init__(made)
    made.impl = SimpleNamespace(**{"scale": 0.25, **(impl or {})})
    for name, value in {**FIELDS, **fields}.items():
        setattr(made, name, value)
    return made


def model(*layers: Any) -> torch.nn.Module:
    """Lay modules out as a decoder has them: `layers.<n>.self_attn.attn`."""
    whole = torch.nn.Module()
    whole.layers = torch.nn.ModuleList()
    for layer in layers:
        block, inner = torch.nn.Module(), torch.nn.Module()
        inner.attn = layer
        block.self_attn = inner
        whole.layers.append(block)
    return whole


def only(**fields: Any) -> LocalLayer:
    (layer,) = find_attention_layers(model(attention(**fields)))
    return layer


def test_heads_sizes_and_layers_are_the_modules_own() -> None:
    odd = attention(num_heads=6, num_kv_heads=1, head_size=48, head_size_v=16)
    plain, other = find_attention_layers(model(attention(), odd))
    assert (plain.layer, plain.path) == (0, "layers.0.self_attn.attn")
    assert (other.layer, other.path) == (1, "layers.1.self_attn.attn")
    assert (other.num_heads, other.num_kv_heads) == (6, 1)
    assert (other.head_size, other.v_head_size) == (48, 16)


def test_the_scale_is_the_kernels_and_not_the_usual_one() -> None:
    assert only().scale == 0.25 != 32**-0.5


def test_a_window_is_the_keys_that_a_query_sees() -> None:
    # What GPU back ends keep beside it is (keys before the query, keys after it).
    assert only(sliding_window=12, impl={"sliding_window": (11, 0)}).sliding_window == 12
    assert only(impl={"sliding_window": (-1, -1)}).sliding_window is None


@pytest.mark.parametrize("name", ["logits_soft_cap", "logit_cap"])
def test_a_soft_cap_of_zero_is_none(name: str) -> None:
    assert only(impl={name: 30.0}).logit_softcap == 30.0
    assert only(impl={name: 0}).logit_softcap is None
    assert only(impl={name: None}).logit_softcap is None
    assert only().logit_softcap is None


def test_slopes_and_sinks_are_plain_numbers_whatever_holds_them() -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.bfloat16)
    layer = only(impl={"sinks": sinks, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625]})
    assert layer.sinks == (0.5, -1.0, 2.0, 0.25)
    assert layer.alibi_slopes == (0.5, 0.25, 0.125, 0.0625)
    assert (only().sinks, only().alibi_slopes) == (None, None)


def test_other_attention_is_refused_by_the_modules_name() -> None:
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    class ChunkedAttention(Attention):
        pass

    for layers, text in (
        ([attention(MLAAttention)], "multi-head latent attention"),
        ([attention(ChunkedAttention)], "is a ChunkedAttention, whose mask"),
        ([attention(attn_type="encoder_only")], "is encoder_only attention"),
        ([attention(attn_type="encoder_decoder")], "is encoder_decoder attention"),
        ([attention(kv_sharing_target_layer_name="layers.0")], "keys and values of layers.0"),
        ([attention(use_alibi_sqrt=True)], "roots of ALiBi's distances"),
        ([attention(impl={"chunk_lookback": 0})], "chunked attention"),
        (
            [attention(kv_cache_torch_dtype=torch.uint8, kv_cache_dtype="fp8")],
            r"values in 8 bits \(fp8\): it attends to rounded ones",
        ),
        ([], "no attention layer"),
    ):
        with pytest.raises(UnsupportedModel, match=text):
            find_attention_layers(model(*layers))
    twice = model(attention())
    twice.layers[0].self_attn.again = attention()
    with pytest.raises(UnsupportedModel, match=r"share a layer number: \[0, 0\]"):
        find_attention_layers(twice)


def test_of_a_mixed_model_the_attention_layers_alone_are_found() -> None:
    mixer = torch.nn.Linear(2, 2)
    mixed = model(mixer, attention(), mixer, attention(sliding_window=8))
    kinds = LayerKinds(("mamba", "attention", "mamba", "sliding_attention"))
    for found in (find_attention_layers(mixed), find_attention_layers(mixed, kinds)):
        assert [(one.layer, one.path) for one in found] == [
            (1, "layers.1.self_attn.attn"),
            (3, "layers.3.self_attn.attn"),
        ]
        assert [one.shares_block for one in found] == [False, False]
    merged = merge_semantics([find_attention_layers(mixed, kinds)], 4, 2)
    assert [one.layer for one in merged] == [1, 3]


@pytest.mark.parametrize("kinds", [("attention", "mamba"), ("mamba", "attention", "attention")])
def test_a_mixed_model_whose_attention_is_elsewhere_is_refused(kinds: tuple[str, ...]) -> None:
    mixed = model(torch.nn.Linear(2, 2), attention())
    text = r"its layers are attention: .*; without attention: .*; but .* attention is in 1;"
    with pytest.raises(UnsupportedModel, match=text):
        find_attention_layers(mixed, LayerKinds(kinds))


def shared_block(*places: Any) -> torch.nn.Module:
    """Lay out one block that layers 1 and 3 call, with attention of its own for each of them."""
    whole, block, inner = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    inner.dpa_list = torch.nn.ModuleList(places)
    block.self_attn = inner
    whole.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(4))
    for number in (1, 3):
        whole.layers[number].shared_transformer = block
    return whole


def test_layers_that_share_a_block_are_told_apart_by_their_place_in_it() -> None:
    kinds = LayerKinds(("mamba", "hybrid", "mamba", "hybrid"))
    found = find_attention_layers(shared_block(attention(), attention()), kinds)
    paths = [f"layers.1.shared_transformer.self_attn.dpa_list.{place}" for place in (0, 1)]
    assert [(one.layer, one.path, one.shares_block) for one in found] == [
        (1, paths[0], True),
        (3, paths[1], True),
    ]
    refuse_shared_sites(found, ["rot_q", "z"])
    with pytest.raises(UnsupportedModel, match=r"layers 1, 3 share .* take pre_q, proj_in out of"):
        refuse_shared_sites(found, ["pre_q", "z", "proj_in"])
    with pytest.raises(UnsupportedModel, match="does not tell which layer"):
        find_attention_layers(shared_block(attention(), attention()))


def test_what_is_switched_off_is_not_refused() -> None:
    plain = {"kv_cache_torch_dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    assert only(use_alibi_sqrt=False, impl={"chunk_lookback": -1}, **plain) == only()


def test_ranks_views_are_joined_in_their_order() -> None:
    views = [
        [only(impl={"sinks": torch.tensor(values), "alibi_slopes": list(values)})]
        for values in ((1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0))
    ]
    (joined,) = merge_semantics(views, 8, 4)
    assert joined.sinks == joined.alibi_slopes == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert (joined.num_heads, joined.num_kv_heads, joined.scale) == (8, 4, 0.25)
    alone = local_semantics(views[1][0])
    assert (alone.sinks, alone.num_heads) == ([5.0, 6.0, 7.0, 8.0], 4)
    with pytest.raises(UnsupportedModel, match="4 per-head values for 8 heads"):
        merge_semantics([views[0], [only()]], 8, 4)


def test_ranks_that_disagree_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="ranks disagree about layer 0"):
        merge_semantics([[only()], [only(sliding_window=12)]], 8, 4)


def test_layers_of_several_shapes_are_captured_by_choice_alone(tmp_path) -> None:
    """What a unit's arrays hold is cut alike for all layers."""
    other = [LocalLayer(2, "l2", 4, 2, 32, 16, 0.25, None, None, None, None)]
    budget = {"host_bytes": 64 << 20, "slot_bytes": 1 << 20}
    with pytest.raises(CaptureError, match=r"layer 2 has other heads than layer 0 .*layers of one"):
        RandomEngine(CaptureSettings(**budget), 2, 16, more_layers=other)
    for layers in ((0, 1), (2,)):
        settings = CaptureSettings(layers=layers, **budget)
        rank = RandomEngine(settings, 2, 16, more_layers=other).rank
        assert tuple(layer.layer for layer in rank.taken) == layers
        rank.close()
    with pytest.raises(CaptureError, match=r"no attention layer \[7\]; it has \[0, 1, 2\]"):
        RandomEngine(CaptureSettings(layers=(0, 7), **budget), 2, 16, more_layers=other)
