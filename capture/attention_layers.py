"""The attention layers of a loaded vLLM model, and what each of them computes.

Layers are found as modules of exactly vLLM's `Attention` class: its subclasses change the mask, and
MLA passes latents under the same names; layers without one have no attention and are passed over.
Heads, sizes, scale, window, soft-cap, ALiBi and sinks are
read from the module and its `impl`, never guessed from the HF config. This runs on a rank: head
numbers are local, and `merge_semantics` puts the ranks' shares together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from capture.errors import UnsupportedModel
from capture.layer_kinds import LayerKinds
from store.run_format import LayerSemantics
from store.selection import describe


@dataclass(frozen=True, slots=True)
class LocalLayer:
    """One attention layer as a rank sees it; `path` is the module's name in the model."""

    layer: int
    path: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    scale: float
    sliding_window: int | None
    logit_softcap: float | None
    alibi_slopes: tuple[float, ...] | None
    sinks: tuple[float, ...] | None
    shares_block: bool = False
    """Whether its projections are those of other layers too."""


def find_attention_layers(
    model: torch.nn.Module, kinds: LayerKinds | None = None
) -> list[LocalLayer]:
    """Return the model's attention layers in layer order.

    `kinds` is what the model's config says of its layers; where they are mixed, those with
    attention must be the ones found. Raises `UnsupportedModel`, naming the modules, where there are
    none or one cannot be captured faithfully.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    layers: list[LocalLayer] = []
    for path, module in model.named_modules():
        if isinstance(module, MLAAttention):
            raise UnsupportedModel(
                f"{path} is multi-head latent attention: what its kernel gets are latents, not "
                "per-head q, k and v; this model cannot be captured"
            )
        if not isinstance(module, Attention):
            continue
        if type(module) is not Attention:
            raise UnsupportedModel(
                f"{path} is a {type(module).__name__}, whose mask this version cannot rebuild; "
                "this model cannot be captured"
            )
        number, shares = _number(path, kinds)
        layers.append(replace(_describe(number, path, module), shares_block=shares))
    if not layers:
        raise UnsupportedModel("the model has no attention layer of vLLM's Attention class")
    layers.sort(key=lambda layer: layer.layer)
    numbers = [layer.layer for layer in layers]
    if len(set(numbers)) != len(numbers):
        raise UnsupportedModel(f"several attention modules share a layer number: {numbers}")
    if kinds is not None and kinds.is_mixed and numbers != list(kinds.attention):
        raise UnsupportedModel(
            f"by the model's config its layers are {kinds.sentence()}; but as vLLM loads it, "
            f"attention is in {describe(numbers)}; this model cannot be captured"
        )
    return layers


def _number(path: str, kinds: LayerKinds | None) -> tuple[int, bool]:
    """Return the number of the layer that calls an attention module, and if its block has others.

    Where several layers share one block (Zamba-2), its attention modules lie in a list with a place
    for each layer that has attention, and the path names the first layer that uses the block.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    integers = [int(name) for name in path.split(".") if name.isdecimal()]
    if len(integers) == 1:
        return int(extract_layer_index(path)), False
    calls = () if kinds is None else kinds.attention
    if len(integers) == 2 and integers[0] in calls and integers[1] < len(calls):
        return calls[integers[1]], True
    raise UnsupportedModel(
        f"{path} does not tell which layer its attention is of; this model cannot be captured"
    )


def refuse_shared_sites(layers: Sequence[LocalLayer], sites: Sequence[str]) -> None:
    """Raise `UnsupportedModel` for sites of projections that several layers call in one pass."""
    asked = [site for site in ("pre_q", "pre_k", "proj_in") if site in sites]
    shared = [layer.layer for layer in layers if layer.shares_block]
    if asked and shared:
        raise UnsupportedModel(
            f"layers {describe(shared)} share their projections with each other, whose inputs and "
            f"outputs are not told apart: take {', '.join(asked)} out of capture.sites (z is what "
            "W_O takes there)"
        )


def _describe(layer: int, path: str, module: Any) -> LocalLayer:
    if module.attn_type != "decoder":
        raise UnsupportedModel(
            f"{path} is {module.attn_type} attention; only decoders are captured"
        )
    if module.kv_sharing_target_layer_name is not None:
        raise UnsupportedModel(
            f"{path} uses the keys and values of {module.kv_sharing_target_layer_name}; "
            "shared K/V layers are not supported yet"
        )
    _refuse_other_arithmetic(path, module)
    impl = module.impl
    softcap = _first(impl, "logits_soft_cap", "logit_cap")
    slopes = getattr(impl, "alibi_slopes", None)
    sinks = getattr(impl, "sinks", None)
    return LocalLayer(
        layer=layer,
        path=path,
        num_heads=module.num_heads,
        num_kv_heads=module.num_kv_heads,
        head_size=module.head_size,
        v_head_size=getattr(module, "head_size_v", module.head_size),
        scale=float(impl.scale),
        sliding_window=module.sliding_window,
        logit_softcap=float(softcap) if softcap else None,
        alibi_slopes=_floats(slopes),
        sinks=_floats(sinks),
    )


def _refuse_other_arithmetic(path: str, module: Any) -> None:
    """Raise `UnsupportedModel` where the kernel does what `LayerSemantics` has no word for."""
    if getattr(module, "use_alibi_sqrt", False):
        raise UnsupportedModel(f"{path} takes the roots of ALiBi's distances; they are not rebuilt")
    if getattr(module.impl, "chunk_lookback", -1) > -1:
        raise UnsupportedModel(f"{path} is chunked attention, whose mask cannot be rebuilt")
    kept = getattr(module, "kv_cache_torch_dtype", None)
    if kept is not None and kept.itemsize < 2:
        # Checkpoints may ask for it themselves (quantization_config.kv_cache_scheme).
        raise UnsupportedModel(
            f"{path} keeps keys and values in {8 * kept.itemsize} bits ({module.kv_cache_dtype}): "
            "it attends to rounded ones, which are not those captured; set "
            "engine.options.kv_cache_dtype to the model's dtype"
        )


def _first(impl: Any, *names: str) -> Any:
    for name in names:
        if (value := getattr(impl, name, None)) is not None:
            return value
    return None


def _floats(values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    if isinstance(values, torch.Tensor):
        values = values.detach().float().flatten().tolist()
    return tuple(float(value) for value in values)


def merge_semantics(
    ranks: Sequence[Sequence[LocalLayer]], total_heads: int, total_kv_heads: int
) -> list[LayerSemantics]:
    """Join the ranks' views of each layer, in rank order, into the model's global semantics.

    Raises `UnsupportedModel` where ranks disagree in anything that all of them must share.
    """
    merged: list[LayerSemantics] = []
    for views in zip(*ranks, strict=True):
        first = views[0]
        shared = [replace(view, alibi_slopes=None, sinks=None) for view in views]
        if any(view != shared[0] for view in shared):
            raise UnsupportedModel(f"ranks disagree about layer {first.layer}: {shared}")
        merged.append(
            LayerSemantics(
                layer=first.layer,
                module=first.path,
                num_heads=total_heads,
                num_kv_heads=total_kv_heads,
                head_size=first.head_size,
                v_head_size=first.v_head_size,
                scale=first.scale,
                sliding_window=first.sliding_window,
                logit_softcap=first.logit_softcap,
                alibi_slopes=_joined(total_heads, first.layer, [v.alibi_slopes for v in views]),
                sinks=_joined(total_heads, first.layer, [v.sinks for v in views]),
            )
        )
    return merged


def local_semantics(layer: LocalLayer) -> LayerSemantics:
    """Return what a rank's share of a layer computes; head numbers are the rank's own."""
    return merge_semantics([[layer]], layer.num_heads, layer.num_kv_heads)[0]


def _joined(
    total_heads: int, layer: int, parts: Sequence[tuple[float, ...] | None]
) -> list[float] | None:
    if all(part is None for part in parts):
        return None
    values = [value for part in parts for value in (part or ())]
    if len(values) != total_heads:
        raise UnsupportedModel(
            f"layer {layer}: {len(values)} per-head values for {total_heads} heads"
        )
    return values
