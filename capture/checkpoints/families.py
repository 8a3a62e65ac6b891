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
    not_on_cpu: str = ""
    """Why vLLM's CPU engine does not run it, or not as the model is, in float32."""


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
_MIXED = {
    **_GROUPED,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "pad_token_id": 0,
    "max_position_embeddings": 1024,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
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
        "qwen3_next": Family(
            "attention in layers 1 and 3 only, between gated delta nets; gated: proj_in is not z",
            {
                **_MIXED,
                **_DELTA,
                "mlp_only_layers": [0, 1, 2],  # vLLM wants experts in some layer
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
            },
            not_on_cpu=(
                "its delta nets take bfloat16 alone there; in it every head is within parity.py's "
                "bars, on one rank and two"
            ),
        ),
        "olmo_hybrid": Family(
            "attention in layers 1 and 3 only, between gated delta nets; QK-norm over all heads",
            {**_MIXED, **_DELTA},
            not_on_cpu="its delta nets are Triton kernels",
        ),
        "granitemoehybrid": Family(
            "attention in layers 1 and 3 only, between Mamba-2 layers; a multiplier for a scale",
            {
                **_MIXED,
                **_MAMBA2,
                "layer_types": ["mamba", "attention", "mamba", "attention"],
                "attention_multiplier": 0.4,
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "shared_intermediate_size": 96,
                "position_embedding_type": "rope",
            },
            in_ci=True,
        ),
        "jamba": Family(
            "attention in layers 1 and 3 only, between Mamba layers; no positions",
            {
                **_MIXED,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "num_experts": 1,
                "num_experts_per_tok": 1,
                "mamba_d_state": 16,
                "mamba_expand": 2,
            },
            not_on_cpu="its Mamba scan has no CPU kernel",
        ),
        "falcon_h1": Family(
            "attention beside Mamba-2 in every layer, multiplied keys",
            {
                **_MIXED,
                **_MAMBA2,
                "num_hidden_layers": 2,
                "mamba_d_ssm": 256,
                "key_multiplier": 0.7,
                "attention_out_multiplier": 0.8,
            },
        ),
        "lfm2": Family(
            "attention in layers 1 and 3 only, between short convolutions; QK-norm",
            {
                **_MIXED,
                "layer_types": ["conv", "full_attention", "conv", "full_attention"],
                "block_auto_adjust_ff_dim": False,
                "conv_dim": 128,
                "block_dim": 128,
                "block_ff_dim": 96,
            },
            not_on_cpu=(
                "vLLM's rotary kernel for the CPU gives its queries and keys the wrong positions: "
                "they come to it with a dimension for heads"
            ),
        ),
        "zamba2": Family(
            "attention in layers 1 and 3 only, one block of weights for both, Mamba-2 after it",
            {
                **_SMALL,
                "num_hidden_layers": 4,
                "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
                "mamba_d_state": 32,
                "n_mamba_heads": 8,
                "chunk_size": 16,
                "num_mem_blocks": 1,
                "adapter_rank": 8,
                "use_shared_attention_adapter": True,
                "use_mem_rope": True,
                "pad_token_id": 0,
            },
        ),
        "nemotron_h": Family(
            "attention in layers 1 and 4 only, between Mamba-2 and MLP layers; no positions",
            {
                **_GROUPED,
                "num_hidden_layers": 5,
                "head_dim": 32,
                "pad_token_id": 0,
                "hybrid_override_pattern": "M*M-*",
                "ssm_state_size": 32,
                "mamba_num_heads": 8,
                "mamba_head_dim": 32,
                "n_groups": 1,
                "chunk_size": 16,
            },
        ),
    }
)
