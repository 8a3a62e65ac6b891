"""The linear layers on both sides of an attention layer: the fused projection and W_O.

Both are vLLM's parallel linear layers beside the attention module, found by class. The fused
projection is watched by a torch hook, which sees the rank's own columns; nnsight would gather all
ranks' first. W_O is read by sending unit vectors through the layer's own arithmetic, since its
weight may be packed or quantized. Private parts used: `QKVParallelLinear` with its head counts,
`RowParallelLinear` with `quant_method.apply` and `input_size_per_partition`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from capture.attention_layers import LocalLayer
from capture.errors import UnsupportedModel

OnProjected = Callable[[torch.Tensor, torch.Tensor], None]


def watch_projection(
    modules: Mapping[str, torch.nn.Module], layer: LocalLayer, on_projected: OnProjected
) -> None:
    """Call `on_projected(q_TF, k_TF)`, local heads, before norm and RoPE, in each forward pass.

    Raises `UnsupportedModel` where the layer has no fused projection of q, k and v alone.
    """
    from vllm.model_executor.layers.linear import QKVParallelLinear

    module = _beside(modules, layer, QKVParallelLinear, "fused projection", "pre_q and pre_k")
    q_width = layer.num_heads * layer.head_size
    k_width = layer.num_kv_heads * layer.head_size
    v_width = layer.num_kv_heads * layer.v_head_size
    width = int(module.output_size_per_partition)
    if width != q_width + k_width + v_width:
        raise UnsupportedModel(
            f"the projection beside {layer.path} gives {width} columns, not the {q_width} of q, "
            f"{k_width} of k and {v_width} of v; take pre_q and pre_k out of capture.sites"
        )

    def hook(_module: Any, _args: Any, output: Any) -> None:
        fused_TF = output[0] if isinstance(output, tuple) else output
        fused_TF = fused_TF.reshape(-1, width)
        on_projected(fused_TF[:, :q_width], fused_TF[:, q_width : q_width + k_width])

    module.register_forward_hook(hook)


def watch_output(
    modules: Mapping[str, torch.nn.Module],
    layer: LocalLayer,
    on_input: Callable[[torch.Tensor], None],
) -> None:
    """Call `on_input(x_TF)` with what W_O takes, local heads, in each forward pass."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    module = _beside(modules, layer, RowParallelLinear, "output projection", "proj_in")
    _check_rows(module, layer)

    def hook(_module: Any, args: Any) -> None:
        on_input(args[0].reshape(-1, layer.num_heads * layer.v_head_size))

    module.register_forward_pre_hook(hook)


def output_projection(modules: Mapping[str, torch.nn.Module], layer: LocalLayer) -> np.ndarray:
    """Return the rank's rows of W_O, [local heads * head size of v, hidden], bits as unsigned.

    Raises `UnsupportedModel` where there is none, or where it does not take z.
    """
    from vllm.model_executor.layers.linear import RowParallelLinear

    module = _beside(modules, layer, RowParallelLinear, "output projection", "contributions")
    rows = _check_rows(module, layer)
    parameter = next(p for p in module.parameters() if p.is_floating_point())
    unit_RR = torch.eye(rows, dtype=parameter.dtype, device=parameter.device)
    with torch.no_grad():
        weight_RM = module.quant_method.apply(module, unit_RR, None)
    weight_RM = weight_RM.contiguous().cpu()
    return weight_RM.view(torch.uint8).numpy().copy()


def output_bias(modules: Mapping[str, torch.nn.Module], layer: LocalLayer) -> np.ndarray | None:
    """Return the bias of W_O, [hidden], bits as unsigned; None where there is none.

    vLLM keeps it whole on every rank and adds it on the first.
    """
    from vllm.model_executor.layers.linear import RowParallelLinear

    module = _beside(modules, layer, RowParallelLinear, "output projection", "contributions")
    if getattr(module, "bias", None) is None:
        return None
    weight = next(p for p in module.parameters() if p.is_floating_point())
    bias_M = module.bias.detach().to(weight.dtype).contiguous().cpu()
    return bias_M.view(torch.uint8).numpy().copy()


def _check_rows(module: Any, layer: LocalLayer) -> int:
    rows = layer.num_heads * layer.v_head_size
    if int(module.input_size_per_partition) != rows:
        raise UnsupportedModel(
            f"the output projection beside {layer.path} takes {module.input_size_per_partition} "
            f"features, z has {rows}; set capture.output_weights to false and leave out proj_in"
        )
    return rows


def _beside(
    modules: Mapping[str, torch.nn.Module], layer: LocalLayer, kind: type, what: str, why: str
) -> Any:
    parent = modules[layer.path.rpartition(".")[0]]
    if layer.shares_block:  # Its attention modules are in a list, one for each layer.
        parent = modules[layer.path.rsplit(".", 2)[0]]
    found = [child for child in parent.children() if isinstance(child, kind)]
    if len(found) != 1:
        raise UnsupportedModel(
            f"{layer.path} has {len(found)} modules of class {kind.__name__} beside it where one "
            f"{what} was expected, so {why} cannot be captured of this model"
        )
    return found[0]
