"""What the capture reads of vLLM's model config; parts of it are private."""

from __future__ import annotations

from typing import Any


class _OneRank:
    """Stands for a parallel config of one rank where vLLM asks for one."""

    tensor_parallel_size = 1


def total_query_heads(config: Any) -> int:
    """Return the query heads of a vLLM `ModelConfig` over all ranks."""
    return int(config.get_num_attention_heads(_OneRank()))
