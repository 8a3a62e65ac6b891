"""What the capture reads of vLLM's model config; parts of it are private."""

from __future__ import annotations

from typing import Any


class _OneRank:
    """Stands for a parallel config of one rank where vLLM asks for one."""

    tensor_parallel_size = 1


def total_query_heads(config: Any) -> int:
    """Return the query heads of a vLLM `ModelConfig` over all ranks."""
    return int(config.get_num_attention_heads(_OneRank()))


def text_config(config: Any) -> dict[str, Any]:
    """Return what a vLLM `ModelConfig` holds of the decoder's own config, as plain values."""
    return dict(config.hf_text_config.to_dict())
