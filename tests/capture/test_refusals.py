"""Models and options of unfaithful rows are refused by name before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capture.checkpoints.families import FAMILIES
from capture.errors import UnsupportedModel, UnsupportedOption
from capture.refusals import refuse_model, refuse_options
from capture.settings import CaptureSettings, EngineSettings, StoreLocation

REFUSED = {
    "mla": ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "multi-head latent attention"),
    "mla inside": (
        {"model_type": "some_vlm", "text_config": {"model_type": "x", "kv_lora_rank": 64}},
        "kv_lora_rank 64",
    ),
    "mamba": ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "state-space"),
    "mamba2": ({"model_type": "mamba2"}, "state-space"),
    "rwkv": ({"model_type": "rwkv"}, "state-space"),
    "kimi linear": (
        {"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1, 2]}},
        "latent attention or linear attention",
    ),
    "kimi linear's rank": (
        {"model_type": "kimi_linear", "linear_attn_config": {}, "kv_lora_rank": 512},
        "multi-head latent attention",
    ),
    "no attention at all": (
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "mamba"]},
        r"none of its layers has attention \(mamba\)",
    ),
    "mamba_ssm's own config": ({"ssm_cfg": {"layer": "Mamba2"}, "d_model": 64}, "ssm_cfg"),
    "mixed, but which": (
        {"model_type": "bamba", "num_hidden_layers": 4, "mamba_d_state": 128},
        r"\(mamba_d_state 128\), and its config does not say .* which layers have attention",
    ),
    "minimax": (
        {"model_type": "minimax_text_01", "attn_type_list": [0, 1], "num_hidden_layers": 2},
        "does not say in a way that this version reads",
    ),
    "attention of another kind": (
        {"model_type": "new", "layer_types": ["full_attention", "indexed_attention"]},
        "layers 1 of it are of the kind 'indexed_attention', which this version does not know",
    ),
    "bert": ({"model_type": "bert", "architectures": ["BertModel"]}, "encoder-only"),
    "masked": ({"model_type": "esm", "architectures": ["EsmForMaskedLM"]}, "encoder-only"),
    "bidirectional": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        "encoder-only",
    ),
    "gemma 4's images and text": (
        {"model_type": "gemma4_text", "use_bidirectional_attention": "all"},
        "encoder-only",
    ),
    "t5": ({"model_type": "t5", "is_encoder_decoder": True}, "cross-attention"),
    "mllama": (
        {"model_type": "mllama", "text_config": {"cross_attention_layers": [3]}},
        "cross-attention",
    ),
    "gemma3n": (
        {"model_type": "gemma3n", "text_config": {"num_kv_shared_layers": 15}},
        "last 15 layers use the keys and values of earlier",
    ),
    "whisper": (
        {"model_type": "whisper", "is_encoder_decoder": True, "architectures": ["Whisper"]},
        "cross-attention",
    ),
    "modernbert": ({"model_type": "modernbert"}, "encoder-only"),
    "qwen2.5 1m": (
        {"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 262144}},
        "dual chunk attention",
    ),
    "llama4": (
        {"model_type": "llama4", "text_config": {"attention_chunk_size": 8192}},
        "chunked",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_of_another_attention_is_refused_by_name(name: str) -> None:
    config, text = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=text) as caught:
        refuse_model(config, "the/model")
    assert "the/model" in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_captured_families_are_not_refused(family: str) -> None:
    refuse_model({"model_type": family, **FAMILIES[family].settings}, family)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "granitemoehybrid", "layer_types": ["attention"], "mamba_d_state": 128},
        {"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"]},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-M*", "num_hidden_layers": 7},
        {
            "model_type": "qwen3_5",
            "text_config": {"layer_types": ["linear_attention", "attention"]},
        },
        {"model_type": "gemma4_text", "use_bidirectional_attention": "vision"},
        {"model_type": "deepseek", "kv_lora_rank": None},
    ],
)
def test_mixed_layers_and_switched_off_parts_are_not_refused(config: dict) -> None:
    refuse_model(config, "the/model")


OPTIONS = [
    ("pipeline_parallel_size", 2),
    ("data_parallel_size", 2),
    ("decode_context_parallel_size", 2),
    ("enable_prefix_caching", True),
    ("async_scheduling", True),
    ("speculative_config", {"model": "draft"}),
    ("enforce_eager", False),
    ("kv_cache_dtype", "fp8"),
    ("worker_cls", "other.Worker"),
]


@pytest.mark.parametrize(("name", "value"), OPTIONS, ids=[name for name, _ in OPTIONS])
def test_an_option_that_would_lose_rows_is_refused(name: str, value: object) -> None:
    with pytest.raises(UnsupportedOption, match=rf"engine\.options\.{name}"):
        refuse_options(EngineSettings(model="m", options={name: value}))


def test_harmless_options_pass() -> None:
    harmless = {
        "pipeline_parallel_size": 1,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "kv_cache_dtype": "bfloat16",
        "block_size": 32,
    }
    refuse_options(EngineSettings(model="m", options=harmless))


def test_the_engine_refuses_before_it_loads_anything(tmp_path: Path) -> None:
    from capture.engine import CaptureEngine

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    location = StoreLocation(str(tmp_path / "run"))
    for body, options, error in [
        ({"model_type": "mamba"}, {}, UnsupportedModel),
        ({"model_type": "llama"}, {"pipeline_parallel_size": 2}, UnsupportedOption),
        ({"layer_types": ["conv", "full_attention"]}, {}, UnsupportedOption),
        ({"text_config": {"layer_types": ["conv", "full_attention"]}}, {}, UnsupportedOption),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(body))
        settings = EngineSettings(model=str(tmp_path), options=options)
        with pytest.raises(error):
            CaptureEngine.start(settings, CaptureSettings(layers=(0, 1)), location, "ab" * 8)
