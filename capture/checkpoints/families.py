"""The tiny shapes, one per family of attention: enough to show what is special about each.

Settings are named as transformers names them; `model_type` is the family's name unless given.
They keep what a family is about (QK-norm, a head size that is not hidden/heads, grouped heads) and
shrink all else.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # QK-norm; head size 32 where hidden/heads is 16; four query heads to a key-value head.
        "qwen3": {
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
        # Plain: rotary, grouped heads, nothing else.
        "llama": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
        },
    }
)
