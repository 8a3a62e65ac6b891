"""What HF transformers' eager attention computes, recorded layer by layer, as ground truth.

Legend: H query heads, K kv heads, T tokens, D head size.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerReference:
    """One layer on one prompt, float32: what went into the attention and what came out."""

    rot_q_HTD: np.ndarray
    rot_k_KTD: np.ndarray
    v_KTD: np.ndarray
    z_HTD: np.ndarray
    pattern_HTT: np.ndarray

    def site(self, name: str) -> np.ndarray:
        return {
            "rot_q": self.rot_q_HTD,
            "rot_k": self.rot_k_KTD,
            "v": self.v_KTD,
            "z": self.z_HTD,
            "pattern": self.pattern_HTT,
        }[name]


class HFReference:
    """A checkpoint in transformers, float32, eager attention with a recorder around it."""

    def __init__(self, model_dir: Path | str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            str(model_dir), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._records: list[LayerReference] = []
        names = sys.modules[type(self.model).__module__]
        original = names.eager_attention_forward

        def recording(module: Any, query: Any, key: Any, value: Any, *args: Any, **kw: Any) -> Any:
            output, weights = original(module, query, key, value, *args, **kw)
            self._records.append(
                LayerReference(
                    query[0].numpy().copy(),
                    key[0].numpy().copy(),
                    value[0].numpy().copy(),
                    output[0].transpose(0, 1).numpy().copy(),
                    weights[0].numpy().copy(),
                )
            )
            return output, weights

        names.eager_attention_forward = recording
        self._restore = lambda: setattr(names, "eager_attention_forward", original)

    def layers(self, token_ids: list[int] | np.ndarray) -> list[LayerReference]:
        """Run one prompt alone and return what each layer's attention saw and gave, in order."""
        self._records.clear()
        ids = torch.tensor([[int(token) for token in token_ids]])
        with torch.no_grad():
            self.model(ids, use_cache=False)
        return list(self._records)

    def close(self) -> None:
        self._restore()
