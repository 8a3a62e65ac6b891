"""The tiny shapes, one per family of attention: enough to show what is special about each.

Settings are named as transformers names them; `model_type` is the family's name unless given.
They keep what a family is about (QK-norm, a head size that is not hidden/heads, grouped heads,
windows shorter than the prompts) and shrink all else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """A tiny shape, and what of attention it is there to show."""

    special: str
    settings: Mapping[str, Any]
    in_ci: bool = False
    """Whether every test run captures it; the rest is for `make models`."""


_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False}
_OLD = {"hidden_size": 128, "n_layer": 2, "n_head": 4}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen3": Family(
            "QK-norm; head size 32 where hidden/heads is 16; four query heads to a kv head",
            {
                "hidden_size": 128,
                "intermediate_size": 192,
                "num_hidden_layers": 3,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "max_position_embeddings": 1024,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "use_sliding_window": False,
            },
            in_ci=True,
        ),
        "llama": Family(
            "rotary, grouped heads, nothing else",
            {**_GROUPED, "head_dim": 32, "max_position_embeddings": 1024},
        ),
        "mistral": Family("sliding window of 12", {**_GROUPED, "sliding_window": 12}, in_ci=True),
        "mixtral": Family(
            "experts after the attention", {**_GROUPED, **_EXPERTS, "sliding_window": None}
        ),
        "qwen2": Family("bias on q, k and v", {**_GROUPED, "use_sliding_window": False}),
        "qwen3_moe": Family(
            "QK-norm, experts after the attention",
            {
                **_GROUPED,
                "head_dim": 32,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
            },
        ),
        "gemma2": Family(
            "soft-capped logits, a window on every second layer, a scale of its own",
            {
                **_GROUPED,
                "num_hidden_layers": 3,
                "head_dim": 32,
                "query_pre_attn_scalar": 20,
                "tie_word_embeddings": True,
                "attn_logit_softcapping": 3.0,
                "final_logit_softcapping": 30.0,
                "sliding_window": 12,
                "layer_types": _WINDOWS,
                "pad_token_id": 0,
            },
            in_ci=True,
        ),
        "gemma3": Family(
            "QK-norm, windows, two rotary bases",
            {
                **_GROUPED,
                "model_type": "gemma3_text",
                "num_hidden_layers": 3,
                "head_dim": 32,
                "query_pre_attn_scalar": 20,
                "tie_word_embeddings": True,
                "sliding_window": 12,
                "layer_types": _WINDOWS,
                "pad_token_id": 0,
            },
        ),
        "gpt_oss": Family(
            "learned sinks, a window on every second layer, experts",
            {
                **_GROUPED,
                **_EXPERTS,
                "intermediate_size": 128,
                "head_dim": 32,
                "sliding_window": 12,
                "layer_types": _WINDOWS[:2],
                "pad_token_id": 0,
                "max_position_embeddings": 131_072,
            },
            in_ci=True,
        ),
        "bloom": Family("ALiBi", dict(_OLD), in_ci=True),
        "gpt_neox": Family(
            "partial rotary; runs on vLLM's Transformers back end",
            {**_SMALL, "rotary_pct": 0.25, "pad_token_id": 0},
            in_ci=True,
        ),
        "granite": Family(
            "attention multiplier in place of the usual scale",
            {**_GROUPED, "attention_multiplier": 0.4, "residual_multiplier": 0.5},
            in_ci=True,
        ),
        "afmoe": Family(
            "gated: W_O's input (proj_in) is not z; QK-norm, windows, some layers without rotary",
            {
                **_GROUPED,
                "num_hidden_layers": 3,
                "num_dense_layers": 3,
                "head_dim": 32,
                "sliding_window": 12,
                "layer_types": _WINDOWS,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "n_group": 1,
                "topk_group": 1,
                "score_func": "sigmoid",
                "route_norm": True,
            },
            in_ci=True,
        ),
        "gpt2": Family(
            "learned positions, every head its own keys",
            {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512},
        ),
        "opt": Family(
            "learned positions, bias everywhere",
            {**_SMALL, "ffn_dim": 96, "word_embed_proj_dim": 128, "pad_token_id": 1},
        ),
        "phi3": Family("one fused projection", {**_GROUPED, "pad_token_id": 0}),
        "olmo2": Family(
            "QK-norm over all heads at once; runs on vLLM's Transformers back end", dict(_GROUPED)
        ),
        "stablelm": Family(
            "partial rotary, LayerNorm", {**_GROUPED, "partial_rotary_factor": 0.25}
        ),
        "glm4": Family(
            "partial rotary, interleaved",
            {**_GROUPED, "head_dim": 32, "partial_rotary_factor": 0.5, "pad_token_id": 0},
        ),
        "cohere2": Family(
            "parallel attention and MLP, windows, some layers without rotary",
            {
                **_GROUPED,
                "num_hidden_layers": 3,
                "sliding_window": 12,
                "layer_types": _WINDOWS,
                "tie_word_embeddings": True,
                "pad_token_id": 0,
            },
        ),
        "falcon": Family(
            "one kv head for all query heads",
            {
                "hidden_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "multi_query": True,
                "new_decoder_architecture": False,
                "alibi": False,
            },
        ),
        "falcon_grouped": Family(
            "grouped heads, interleaved fused projection",
            {
                "model_type": "falcon",
                "hidden_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_kv_heads": 2,
                "new_decoder_architecture": True,
                "alibi": False,
            },
        ),
        "falcon_alibi": Family(
            "ALiBi, every head its own keys",
            {
                "model_type": "falcon",
                "hidden_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "multi_query": False,
                "new_decoder_architecture": False,
                "alibi": True,
            },
        ),
    }
)
