"""Reads the rows of rot_q and rot_k that a selection of scores or patterns needs; rebuilds it.

Knows two prompt arrays and the layers' semantics; leaves the formula to `store.attention`. A
pattern needs every key its queries can see, whatever keys are asked for; a sliding window keeps
that to the window, so a late query of a long prompt costs one window of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store import attention as formulas
from store.attention import HeadRows, kv_head_of
from store.errors import SiteNotFound
from store.explain import ReadCost
from store.run_format import LayerSemantics
from store.selection import AxisSelection
from store.unit_arrays import PromptArray

Float32 = NDArray[np.float32]
Indices = NDArray[np.int64]


def attention(
    kind: str,
    semantics: Mapping[int, LayerSemantics],
    rot_q: PromptArray,
    rot_k: PromptArray,
    picked: Sequence[AxisSelection],
) -> Float32:
    """Return scores or patterns (`kind`) [L, N, Q, K] of the picked axes."""
    layers, heads, queries, keys = picked
    shape = (len(layers), len(heads), len(queries), len(keys))
    out_LNQK = np.full(shape, -np.inf if kind == "scores" else 0, np.float32)
    if out_LNQK.size == 0:
        return out_LNQK
    needed = _needed_keys(kind, semantics, rot_k, picked)
    if len(needed.places) == 0:
        return out_LNQK
    q_LNQD = rot_q.read(layers.indices, heads.indices, queries.indices)
    k_LGKD = rot_k.read(needed.layers, needed.heads, needed.places)
    k_positions = rot_k.positions[needed.places]
    columns, inside = _columns(keys.labels, k_positions)
    for place, number in enumerate(layers.labels.tolist()):
        q = HeadRows(q_LNQD[place], heads.labels.tolist(), queries.labels)
        k = HeadRows(k_LGKD[place], needed.kv_heads, k_positions)
        formula = formulas.scores if kind == "scores" else formulas.pattern
        out_LNQK[place][:, :, inside] = formula(semantics[number], q, k, columns)
    return out_LNQK


def cost(
    kind: str,
    semantics: Mapping[int, LayerSemantics],
    rot_q: PromptArray,
    rot_k: PromptArray,
    picked: Sequence[AxisSelection],
) -> ReadCost:
    """Return what `attention` of the same would read; reads nothing."""
    layers, heads, queries, keys = picked
    if min(len(layers), len(heads), len(queries), len(keys)) == 0:
        return ReadCost.total([])
    needed = _needed_keys(kind, semantics, rot_k, picked)
    return ReadCost.total(
        [
            rot_q.cost(layers.indices, heads.indices, queries.indices),
            rot_k.cost(needed.layers, needed.heads, needed.places),
        ]
    )


@dataclass(frozen=True, slots=True)
class _NeededKeys:
    """Which part of rot_k an answer depends on, as indices into what is held."""

    layers: Indices
    heads: Indices
    places: Indices
    kv_heads: list[int]


def _needed_keys(
    kind: str,
    semantics: Mapping[int, LayerSemantics],
    rot_k: PromptArray,
    picked: Sequence[AxisSelection],
) -> _NeededKeys:
    layers, heads, queries, keys = picked
    numbers = [int(number) for number in layers.labels]
    first, last = _key_bounds(kind, [semantics[number] for number in numbers], queries, keys)
    kv_heads = sorted({kv_head_of(semantics[n], int(h)) for n in numbers for h in heads.labels})
    return _NeededKeys(
        layers=_layers_of(rot_k, layers),
        heads=_held_heads(rot_k, kv_heads),
        places=np.flatnonzero((rot_k.positions >= first) & (rot_k.positions <= last)),
        kv_heads=kv_heads,
    )


def _key_bounds(
    kind: str, layers: Sequence[LayerSemantics], queries: AxisSelection, keys: AxisSelection
) -> tuple[int, int]:
    """Return the first and last key position that the answer depends on."""
    last = int(queries.labels.max())
    if kind == "scores":
        return int(keys.labels.min()), min(last, int(keys.labels.max()))
    windows = [layer.sliding_window for layer in layers]
    if any(window is None for window in windows):
        return 0, last
    widest = max(window for window in windows if window is not None)
    return max(0, int(queries.labels.min()) - widest + 1), last


def _columns(wanted: Indices, have: Indices) -> tuple[Indices, Indices]:
    """Return (indices into `have`, places in `wanted`) of the wanted positions that were read."""
    at = np.searchsorted(have, wanted)
    inside = np.flatnonzero((at < len(have)) & (have[np.minimum(at, len(have) - 1)] == wanted))
    return at[inside], inside


def _layers_of(rot_k: PromptArray, layers: AxisSelection) -> Indices:
    places = {layer: place for place, layer in enumerate(rot_k.layers)}
    return np.asarray([places[int(number)] for number in layers.labels], np.int64)


def _held_heads(rot_k: PromptArray, kv_heads: Sequence[int]) -> Indices:
    places = {head: place for place, head in enumerate(rot_k.heads)}
    missing = [head for head in kv_heads if head not in places]
    if missing:
        raise SiteNotFound(f"the run does not hold rot_k of kv heads {missing}, which are needed")
    return np.asarray([places[head] for head in kv_heads], np.int64)
