"""What HF transformers' eager attention computes, recorded layer by layer, as ground truth.

Legend: H query heads, K kv heads, T tokens, D head size.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

_OUTPUTS = ("o_proj", "out_proj", "attn.c_proj", "attention.dense", "self_attention.dense")
"""How the families name W_O."""


@dataclass(frozen=True, slots=True)
class LayerReference:
    """One layer on one prompt, float32: what went into the attention and what came out.

    None where the implementation does not show it.
    """

    rot_q_HTD: np.ndarray | None
    rot_k_KTD: np.ndarray | None
    v_KTD: np.ndarray | None
    z_HTD: np.ndarray
    pattern_HTT: np.ndarray | None
    pre_q_HTD: np.ndarray | None = None
    pre_k_KTD: np.ndarray | None = None
    proj_in_HTD: np.ndarray | None = None

    def site(self, name: str) -> np.ndarray | None:
        return {
            "rot_q": self.rot_q_HTD,
            "rot_k": self.rot_k_KTD,
            "v": self.v_KTD,
            "z": self.z_HTD,
            "pattern": self.pattern_HTT,
            "pre_q": self.pre_q_HTD,
            "pre_k": self.pre_k_KTD,
            "proj_in": self.proj_in_HTD,
        }[name]


def _is_attention(model: torch.nn.Module, path: str) -> bool:
    """Whether a projection is an attention module's: delta nets and Mamba layers have one too."""
    return "Attention" in type(model.get_submodule(path.rpartition(".")[0])).__name__


def _values(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy as float32 on the host."""
    return tensor.detach().float().cpu().numpy().copy()


class HFReference:
    """A checkpoint in transformers with a recorder around its attention.

    Most families call one module-level function with q, k and v; the older ones (BLOOM, Falcon)
    compute inside the module, where z is the input of its `dense` and q, k and v do not show.
    """

    def __init__(
        self,
        model_dir: Path | str,
        implementation: str = "eager",
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        """Load a checkpoint; `settings` replace settings of its config."""
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            str(model_dir), dtype=dtype, attn_implementation=implementation, **settings
        )
        self.model.eval().to(device)
        self._device = device
        self._records: list[LayerReference] = []
        self._restore: list[Any] = []
        self.block_outputs: list[np.ndarray] = []
        """After `layers`: what each layer's attention block added, [T, hidden]."""
        self._projected: dict[str, Any] = {}
        self._into_output: list[np.ndarray] = []
        self._watch_projections()
        names = sys.modules[type(self.model).__module__]
        if hasattr(names, "eager_attention_forward"):
            self._record_function(names)
        else:
            self._record_modules(implementation)

    def _record_function(self, names: Any) -> None:
        original = names.eager_attention_forward
        # OPT hands over queries that are scaled already, where vLLM scales in the kernel.
        scaled_before = self.model.config.model_type == "opt"

        def recording(module: Any, query: Any, key: Any, value: Any, *args: Any, **kw: Any) -> Any:
            output, weights = original(module, query, key, value, *args, **kw)
            if scaled_before:
                query = query / query.shape[-1] ** -0.5
            self._records.append(
                LayerReference(
                    _values(query[0]),
                    _values(key[0]),
                    _values(value[0]),
                    _values(output[0].transpose(0, 1)),
                    _values(weights[0]),
                    self._before("q_proj", query.shape[-1]),
                    self._before("k_proj", query.shape[-1]),
                )
            )
            return output, weights

        names.eager_attention_forward = recording
        self._restore.append(lambda: setattr(names, "eager_attention_forward", original))

    def _watch_projections(self) -> None:
        def keep(name: str) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                self._projected[name] = output[0].detach()

            return hook

        def keep_output(module: Any, args: Any, output: Any) -> None:
            self._into_output.append(_values(args[0]))
            self.block_outputs.append(_values(output))

        for path, module in self.model.named_modules():
            name = path.rpartition(".")[2]
            if name in ("q_proj", "k_proj"):
                self._restore.append(module.register_forward_hook(keep(name)).remove)
            elif path.endswith(_OUTPUTS) and _is_attention(self.model, path):
                self._restore.append(module.register_forward_hook(keep_output).remove)

    def _before(self, name: str, size: int) -> np.ndarray | None:
        """Return what a projection of the current layer gave, [H, T, D]."""
        given = self._projected.pop(name, None)
        if given is None:
            return None
        return _values(given.view(given.shape[0], -1, size).transpose(0, 1))

    def _record_modules(self, implementation: str) -> None:
        heads = self.model.config.num_attention_heads
        inputs: list[Any] = []

        def before_dense(module: Any, args: tuple[Any, ...]) -> None:
            inputs.append(args[0][0].view(args[0].shape[1], heads, -1).transpose(0, 1))

        def after_attention(module: Any, args: Any, output: Any) -> None:
            shown = implementation == "eager" and output[1] is not None
            pattern = _values(output[1][0]) if shown else None
            self._records.append(LayerReference(None, None, None, _values(inputs.pop()), pattern))

        for _, module in self.model.named_modules():
            if type(module).__name__.endswith("Attention") and hasattr(module, "dense"):
                handles = (
                    module.dense.register_forward_pre_hook(before_dense),
                    module.register_forward_hook(after_attention),
                )
                self._restore += [handle.remove for handle in handles]

    def layers(self, token_ids: list[int] | np.ndarray) -> list[LayerReference]:
        """Run one prompt alone and return what each layer's attention saw and gave, in order."""
        self._records.clear()
        self.block_outputs.clear()
        self._into_output.clear()
        ids = torch.tensor([[int(token) for token in token_ids]], device=self._device)
        with torch.no_grad():
            self.model(ids, use_cache=False)
        records = list(self._records)
        self.block_outputs = [x.reshape(len(token_ids), -1) for x in self.block_outputs]
        if len(self._into_output) == len(records):
            for place, (record, x) in enumerate(zip(records, self._into_output, strict=True)):
                heads = record.z_HTD.shape[0]
                x_HTD = x.reshape(len(token_ids), heads, -1).swapaxes(0, 1)
                records[place] = replace(record, proj_in_HTD=x_HTD)
        return records

    def close(self) -> None:
        for restore in self._restore:
            restore()
