"""Which layers have attention, from raw configs and from the config classes that vLLM loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capture.adapters.vllm_config import text_config
from capture.checkpoints.families import FAMILIES
from capture.errors import UnsupportedOption
from capture.layer_kinds import LayerKinds, layer_kinds, refuse_layers, text_part

STATED: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "jamba": (
        {"attn_layer_period": 8, "attn_layer_offset": 4, "num_hidden_layers": 16},
        (4, 12),
        {"mamba": (*range(4), *range(5, 12), *range(13, 16))},
    ),
    "jamba by its name": ({"model_type": "jamba", "num_hidden_layers": 6}, (4,), {}),
    "bamba": (
        {"attn_layer_indices": [1, 3], "num_hidden_layers": 4, "mamba_d_state": 128},
        (1, 3),
        {"mamba": (0, 2)},
    ),
    "minimax": (
        {"layer_types": ["linear_attention", "full_attention"]},
        (1,),
        {"linear_attention": (0,)},
    ),
    "windows": ({"layer_types": ["sliding_attention", "full_attention"]}, (0, 1), {}),
    "a list that goes on": (
        {"layer_types": ["conv", "full_attention", "full_attention"], "num_hidden_layers": 2},
        (1,),
        {"conv": (0,)},
    ),
    "qwen3-next": (
        {"model_type": "qwen3_next", "num_hidden_layers": 8},
        (3, 7),
        {"linear_attention": (0, 1, 2, 4, 5, 6)},
    ),
    "another interval": (
        {"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 2},
        (1, 3),
        {"linear_attention": (0, 2)},
    ),
    "lfm2": ({"full_attn_idxs": [2], "num_hidden_layers": 4}, (2,), {"conv": (0, 1, 3)}),
    "nemotron-h": (
        {"hybrid_override_pattern": "M-M*EM*", "num_hidden_layers": 7},
        (3, 6),
        {"mamba": (0, 2, 5), "mlp": (1,), "moe": (4,)},
    ),
    "zamba2": (
        {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_hidden_layers": 3},
        (1,),
        {"mamba": (0, 2)},
    ),
    "falcon-h1": ({"model_type": "falcon_h1", "num_hidden_layers": 3}, (0, 1, 2), {}),
    "plamo2": (
        {"model_type": "plamo2", "mamba_step": 2, "num_hidden_layers": 4},
        (1, 3),
        {"mamba": (0, 2)},
    ),
    "recurrent gemma": (
        {"block_types": ["recurrent", "recurrent", "attention"], "num_hidden_layers": 5},
        (2,),
        {"recurrent": (0, 1, 3, 4)},
    ),
    "searched blocks": (
        {
            "block_configs": [
                {"attention": {"no_op": False, "n_heads_in_group": 8}},
                {"attention": {"no_op": True}},
                {"attention": {"no_op": False, "replace_with_linear": True}},
            ]
        },
        (0,),
        {"no_op": (1,), "linear": (2,)},
    ),
}


@pytest.mark.parametrize("name", STATED)
def test_a_config_says_which_layers_have_attention(name: str) -> None:
    config, attention, others = STATED[name]
    found = layer_kinds(config)
    assert found is not None
    assert found.attention == attention
    if others or len(attention) == len(found.kinds):
        assert found.others == others
    assert not found.unknown
    assert sorted([*attention, *(n for at in found.others.values() for n in at)]) == list(
        range(len(found.kinds))
    )


def test_a_config_of_one_kind_says_nothing() -> None:
    assert layer_kinds({"model_type": "llama", "num_hidden_layers": 4}) is None
    assert layer_kinds({}) is None


def test_a_word_that_is_not_known_is_neither() -> None:
    found = LayerKinds(("full_attention", "indexed_attention", "conv"))
    assert found.unknown == {"indexed_attention": (1,)}
    assert found.attention == (0,)
    assert found.is_mixed


MIXED = {
    "qwen3_next": [1, 3],
    "olmo_hybrid": [1, 3],
    "granitemoehybrid": [1, 3],
    "jamba": [1, 3],
    "falcon_h1": [0, 1],
    "lfm2": [1, 3],
    "zamba2": [1, 3],
    "nemotron_h": [1, 4],
}


@pytest.mark.parametrize("family", MIXED)
def test_the_config_that_vllm_holds_says_the_same(family: str, tmp_path: Path) -> None:
    """As transformers saves it, and as vLLM's own `ModelConfig` reads it."""
    from transformers import AutoConfig
    from vllm.config import ModelConfig

    settings = {"model_type": family, "vocab_size": 320, **FAMILIES[family].settings}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.architectures = [ARCHITECTURES[family]]
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    loaded = ModelConfig(str(tmp_path), skip_tokenizer_init=True, dtype="float32")
    for body in (saved, text_config(loaded)):
        kinds = layer_kinds(text_part(body))
        assert kinds is not None
        assert list(kinds.attention) == MIXED[family]


ARCHITECTURES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "jamba": "JambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
}


def test_a_layer_without_attention_cannot_be_asked_for() -> None:
    kinds = LayerKinds(("mamba", "attention", "mamba", "attention"))
    refuse_layers(kinds, (1, 3), "the/model")
    refuse_layers(kinds, None, "the/model")
    refuse_layers(None, (0,), "the/model")
    text = r"names \[0, 9\], where the/model has no attention \(layer 0 is mamba\): .* layers 1, 3;"
    with pytest.raises(UnsupportedOption, match=text):
        refuse_layers(kinds, (0, 1, 9), "the/model")
