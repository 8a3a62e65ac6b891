"""What transformers' eager attention makes of a prompt, where a checkpoint is small and at hand.

Public calls of transformers only, in float32 on the CPU. It is a witness, not the truth: some of
its implementations differ from the models' own (`make models` lists them), and those are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from capture.layer_kinds import layer_kinds

MAX_CHECKPOINT_BYTES = 1 << 30
_WEIGHTS = ("*.safetensors", "*.bin")
_MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class ReferencePatterns:
    """Patterns by layer number, [heads, T, T] each; or why there are none."""

    by_layer: dict[int, np.ndarray]
    why_not: str = ""


def reference_patterns(
    model: str, token_ids: np.ndarray, layers: Sequence[int]
) -> ReferencePatterns:
    """Return the eager patterns of these layers of a local checkpoint of at most 1 GiB."""
    folder = Path(model)
    if not folder.is_dir():
        return ReferencePatterns({}, "the model is not a local folder")
    size = sum(file.stat().st_size for name in _WEIGHTS for file in folder.glob(name))
    if not 0 < size <= MAX_CHECKPOINT_BYTES:
        return ReferencePatterns({}, f"the checkpoint has {size} bytes of weights")
    ids = torch.tensor([[int(token) for token in token_ids]])
    try:
        loaded = _load(folder)
        if getattr(loaded.config, "alibi", False):
            return ReferencePatterns({}, "transformers' eager implementation adds ALiBi twice")
        with torch.no_grad():
            shown = loaded(ids, output_attentions=True, use_cache=False).attentions or ()
    except Exception as error:  # noqa: BLE001
        # Policy: a witness that cannot speak is none, whatever it stumbles over, and says why.
        told = f"{type(error).__name__}: {error}"
        return ReferencePatterns({}, f"transformers does not run it: {told[:_MAX_REASON]}")
    text = loaded.config.get_text_config().to_dict()
    kinds = layer_kinds(text)
    # Of a model where not every layer has attention, those that have it may be all that is shown.
    for numbers in (tuple(range(text["num_hidden_layers"])), kinds.attention if kinds else ()):
        by_number = dict(zip(numbers, shown, strict=False))
        if len(shown) == len(numbers) and all(by_number.get(n) is not None for n in layers):
            return ReferencePatterns({n: by_number[n][0].float().numpy().copy() for n in layers})
    return ReferencePatterns({}, "its implementation in transformers shows no patterns")


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
