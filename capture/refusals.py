"""What is refused by name before an engine starts: models and engine options of unfaithful rows.

Knows the model's HF config as plain values and the engine's settings; never an engine. Some of
these models would start and store something wrong without a word (multi-head latent attention with
its padded v), others would fail only at the first prompt, minutes later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capture.errors import UnsupportedModel, UnsupportedOption
from capture.settings import EngineSettings

_STATE_SPACE = (
    "mamba", "rwkv", "falcon_mamba", "jamba", "bamba", "zamba", "nemotron_h", "plamo2", "falcon_h1",
    "lfm2", "recurrent_gemma", "kimi_linear", "xlstm", "qwen3_next", "minimax_text",
)  # fmt: skip
_ENCODERS = (
    "bert", "roberta", "xlm-roberta", "xlm_roberta", "distilbert", "electra", "albert", "deberta",
    "camembert", "modernbert", "nomic_bert", "mpnet", "clip", "siglip",
)  # fmt: skip
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "layer_block_types")
_ATTENTION_LAYERS = ("attention", "full_attention", "sliding_attention", "global", "local")


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
    if kind.startswith(_ENCODERS) or "MaskedLM" in architectures or _bidirectional(config):
        return "its attention is encoder-only (bidirectional); only causal decoders are captured"
    recurrent = _recurrent_layers(config)
    if recurrent is not None:
        return recurrent
    if kind.startswith(_STATE_SPACE) and _mixed_layers(config) is None:
        return f"{kind} has linear or state-space layers in place of attention{_only_in(config)}"
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


def _bidirectional(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_bidirectional_attention")) or config.get("is_causal") is False


def _mixed_layers(config: Mapping[str, Any]) -> Sequence[str] | None:
    for key in _LAYER_LISTS:
        if isinstance(kinds := config.get(key), list | tuple) and kinds:
            return [str(kind) for kind in kinds]
    return None


def _recurrent_layers(config: Mapping[str, Any]) -> str | None:
    kinds = _mixed_layers(config)
    if kinds is not None:
        others = sorted({kind for kind in kinds if kind not in _ATTENTION_LAYERS})
        if others:
            return (
                f"it mixes attention with {', '.join(others)} layers{_only_in(config)}; models "
                "with linear or state-space layers are not supported"
            )
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "M" in pattern:
        return (
            f"it mixes attention with state-space layers (hybrid_override_pattern {pattern})"
            f"{_only_in(config)}"
        )
    for key in ("ssm_cfg", "linear_attn_config", "attn_layer_period", "mamba_d_state"):
        if config.get(key) and not (kinds and key == "mamba_d_state"):
            return f"it has linear or state-space layers ({key} {config[key]}){_only_in(config)}"
    return None


def _only_in(config: Mapping[str, Any]) -> str:
    """Say which layers have attention, where the config tells."""
    kinds = _mixed_layers(config)
    pattern = config.get("hybrid_override_pattern")
    period, count = config.get("attn_layer_period"), config.get("num_hidden_layers")
    layers: list[int] | None = None
    if kinds is not None:
        layers = [number for number, kind in enumerate(kinds) if kind in _ATTENTION_LAYERS]
    elif isinstance(pattern, str):
        layers = [number for number, kind in enumerate(pattern) if kind == "*"]
    elif isinstance(indices := config.get("attn_layer_indices"), list | tuple):
        layers = sorted(int(number) for number in indices)
    elif isinstance(period, int) and isinstance(count, int) and period > 0:
        layers = list(range(int(config.get("attn_layer_offset") or 0) % period, count, period))
    return "" if layers is None else f" (attention is only in layers {layers})"


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
