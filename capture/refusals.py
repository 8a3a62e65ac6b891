"""What is refused by name before an engine starts: models and engine options of unfaithful rows.

Knows the model's HF config as plain values and the engine's settings; never an engine. Some of
these models would start and store something wrong without a word (multi-head latent attention with
its padded v), others would fail only at the first prompt, minutes later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capture.errors import UnsupportedModel, UnsupportedOption
from capture.layer_kinds import layer_kinds, text_part
from capture.settings import EngineSettings
from store.selection import describe

_STATE_SPACE = ("mamba", "rwkv", "falcon_mamba", "xlstm")
_MIXED = (
    "jamba", "bamba", "zamba", "nemotron_h", "plamo2", "falcon_h1", "lfm2", "recurrent_gemma",
    "qwen3_next", "qwen3_5", "minimax_text", "granitemoehybrid", "olmo_hybrid",
    "bailing_moe_linear",
)  # fmt: skip
_STATE_KEYS = ("ssm_cfg", "linear_attn_config", "mamba_d_state")
"""What only a config with linear or state-space layers has."""
_ENCODERS = (
    "bert", "roberta", "xlm-roberta", "xlm_roberta", "distilbert", "electra", "albert", "deberta",
    "camembert", "modernbert", "nomic_bert", "mpnet", "clip", "siglip",
)  # fmt: skip


def refuse_model(config: Mapping[str, Any], name: str) -> None:
    """Raise `UnsupportedModel` for a model whose attention cannot be captured faithfully.

    `config` is the model's `config.json`; where it has a `text_config` that part is looked at too.
    """
    inner = config.get("text_config")
    parts = [config, inner] if isinstance(inner, Mapping) else [config]
    for part in parts:
        problem = _problem(part)
        if problem is not None:
            kind = part.get("model_type", "unknown")
            raise UnsupportedModel(f"{name} (model_type {kind}) cannot be captured: {problem}")


def _problem(config: Mapping[str, Any]) -> str | None:
    kind = str(config.get("model_type", ""))
    architectures = " ".join(map(str, config.get("architectures") or ()))
    if config.get("is_encoder_decoder") or config.get("cross_attention_layers"):
        return (
            "it has cross-attention (an encoder-decoder), whose keys are not rows of the prompt; "
            "only decoders are captured"
        )
    if config.get("kv_lora_rank"):
        return (
            f"its attention is multi-head latent attention (kv_lora_rank "
            f"{config['kv_lora_rank']}): the kernel gets latents, not per-head q, k and v"
        )
    if kind == "kimi_linear":
        return (
            "its layers have multi-head latent attention or linear attention: there are no "
            "per-head q, k and v to capture"
        )
    if kind.startswith(_ENCODERS) or "MaskedLM" in architectures or _is_bidirectional(config):
        return "its attention is encoder-only (bidirectional); only causal decoders are captured"
    bare = _without_attention(kind, config)
    if bare is not None:
        return bare
    if config.get("num_kv_shared_layers"):
        return (
            f"its last {config['num_kv_shared_layers']} layers use the keys and values of earlier "
            "layers; shared K/V layers are not supported"
        )
    if config.get("attention_chunk_size"):
        return (
            f"its attention is chunked (attention_chunk_size {config['attention_chunk_size']}), a "
            "mask that this version cannot rebuild"
        )
    if config.get("dual_chunk_attention_config"):
        return "it uses dual chunk attention, a mask that this version cannot rebuild"
    return None


def _is_bidirectional(config: Mapping[str, Any]) -> bool:
    """Whether text attends to what comes after it.

    Gemma 4's "vision" says that images do, within themselves; its text is causal, and prompts are
    text.
    """
    stated = config.get("use_bidirectional_attention")
    return (bool(stated) and stated != "vision") or config.get("is_causal") is False


def _without_attention(kind: str, config: Mapping[str, Any]) -> str | None:
    """Say why no layer of a model can be captured, where that is so; mixed ones can be."""
    if text_part(config) is not config:
        return None
    kinds = layer_kinds(config)
    if kinds is not None and kinds.unknown:
        word, where = next(iter(kinds.unknown.items()))
        return (
            f"layers {describe(where)} of it are of the kind {word!r}, which this version does not "
            "know and could not rebuild the mask of"
        )
    if kinds is not None and kinds.attention:
        return None
    if kinds is not None:
        return f"none of its layers has attention ({', '.join(sorted(kinds.others))})"
    if kind.startswith(_STATE_SPACE):
        return f"{kind} has linear or state-space layers in place of attention"
    said = [key for key in _STATE_KEYS if config.get(key)]
    if said or kind.startswith(_MIXED):
        why = f" ({said[0]} {config[said[0]]})" if said else ""
        return (
            f"it has linear or state-space layers{why}, and its config does not say in a way that "
            "this version reads which layers have attention"
        )
    return None


def refuse_options(settings: EngineSettings) -> None:
    """Raise `UnsupportedOption` for engine options under which stored rows would not be right."""
    for name, value in settings.options.items():
        if name in _MORE_THAN_ONE and isinstance(value, int) and value > 1:
            raise UnsupportedOption(_message(name, value, _MORE_THAN_ONE[name]))
        if name in _WHEN_TRUE and value:
            raise UnsupportedOption(_message(name, value, _WHEN_TRUE[name]))
    if settings.options.get("enforce_eager") is False:
        reason = "a captured graph does not run the block that reads q, k, v and z"
        raise UnsupportedOption(_message("enforce_eager", False, reason))
    cache = settings.options.get("kv_cache_dtype", "auto")
    if cache not in ("auto", settings.dtype):
        reason = (
            "the kernel would attend to rounded keys and values, and no pattern rebuilt from the "
            "stored ones would be the model's own"
        )
        raise UnsupportedOption(_message("kv_cache_dtype", cache, reason))


_MORE_THAN_ONE = {
    "pipeline_parallel_size": (
        "a rank would hold some layers only; use tensor_parallel_size and more workers"
    ),
    "data_parallel_size": "start more workers instead",
    "decode_context_parallel_size": "a rank would see some positions only",
    "prefill_context_parallel_size": "a rank would see some positions only",
}
_WHEN_TRUE = {
    "enable_prefix_caching": "cached positions are never computed, so their rows do not exist",
    "async_scheduling": "steps run past a request's end, so rows could not be told apart",
    "speculative_config": "rejected draft tokens would leave rows of nobody",
    "enable_dbo": "a step would run as two half steps",
    "kv_transfer_config": "keys that come from elsewhere are never computed here",
    "worker_cls": "the worker that captures is the project's own",
}


def _message(name: str, value: object, reason: str) -> str:
    return f"engine.options.{name} is {value!r}: {reason}; take it out of the config"
