"""Reads selections of stored patterns: just the entries of the packed triangle that are asked for.

Knows one prompt's packed array and the picked axes. Entries above the diagonal are not stored and
are zero. The answer is float32, like that of a rebuilt pattern: the two are one call to a reader.

Legend: L layers, N heads, Q queries, K keys, E entries read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from store.explain import ReadCost
from store.packed_pattern import UINT8_STEPS
from store.selection import AxisSelection
from store.unit_arrays import PromptArray

Float32 = NDArray[np.float32]
Indices = NDArray[np.int64]


def read_pattern(array: PromptArray, picked: Sequence[AxisSelection]) -> Float32:
    """Return [L, N, Q, K] of the picked layers, heads, queries and keys."""
    layers, heads, queries, keys = picked
    seen_QK, entries = _entries(queries, keys)
    out_LNQK = np.zeros((len(layers), len(heads), len(queries), len(keys)), np.float32)
    values_LNE = array.read(layers.indices, heads.indices, entries)[..., 0]
    out_LNQK[:, :, seen_QK] = values_LNE
    if values_LNE.dtype == np.uint8:
        out_LNQK /= UINT8_STEPS
    return out_LNQK


def pattern_cost(array: PromptArray, picked: Sequence[AxisSelection]) -> ReadCost:
    """Return what `read_pattern` of the same would read; reads nothing."""
    layers, heads, queries, keys = picked
    return array.cost(layers.indices, heads.indices, _entries(queries, keys)[1])


def _entries(queries: AxisSelection, keys: AxisSelection) -> tuple[NDArray[np.bool_], Indices]:
    """Return which (query, key) pairs are stored, and their entries in that order."""
    q_Q1, k_1K = queries.labels[:, None], keys.labels[None, :]
    seen_QK = k_1K <= q_Q1
    entries_QK = q_Q1 * (q_Q1 + 1) // 2 + k_1K
    return seen_QK, entries_QK[seen_QK]
