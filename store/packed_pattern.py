"""Attention patterns as they are stored: the lower triangle, packed, row q of a prompt at q(q+1)/2.

Legend: N heads, Q = K rows of a prompt, E entries; `...` no axis or prompts of one length. A causal
pattern is zero above its diagonal, so the packed form holds all of it at half the size. The prompts
of a unit follow each other on the entry axis in the order of its rows. As `uint8` a probability p
is stored as round(255 p), off by at most 1/510.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from store.codec import DTYPES
from store.geometry import CHUNK_TOKENS, MAX_SHARD_BYTES, ArrayGeometry
from store.run_format import Outcome, PromptOutcomes

CHUNK_ENTRIES = 1 << 16
UINT8_STEPS = 255
UINT8_WORST_ERROR = 1 / (2 * UINT8_STEPS)


def num_entries(num_rows: int) -> int:
    """Return how many entries the packed pattern of a prompt of `num_rows` rows has."""
    return num_rows * (num_rows + 1) // 2


def plan_pattern(
    *, num_layers: int, entries: int, num_heads: int, shard_heads: int, dtype: str
) -> ArrayGeometry:
    """Choose the cut of a unit's packed patterns: one head a chunk, entries on the token axis."""
    item_bytes = DTYPES[dtype].itemsize
    whole = -(-max(entries, 1) // CHUNK_TOKENS) * CHUNK_TOKENS
    chunk = min(CHUNK_ENTRIES, whole)
    fitting = max(1, MAX_SHARD_BYTES // (chunk * shard_heads * item_bytes))
    return ArrayGeometry(
        num_layers=num_layers,
        num_tokens=entries,
        num_heads=num_heads,
        head_size=1,
        item_bytes=item_bytes,
        shard_tokens=chunk * min(fitting, -(-whole // chunk)),
        shard_heads=shard_heads,
        chunk_tokens=chunk,
        group_heads=1,
        tags=True,
    )


def entry_starts(num_rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first entry of prompts of so many stored rows (0: none), and the total at the end.

    Prompts follow each other in the order given.
    """
    counts = np.asarray(num_rows, np.int64)
    return np.concatenate(([0], np.cumsum(counts * (counts + 1) // 2))).astype(np.int64)


def pack_query_rows(pattern_NQK: NDArray[Any], first: int, dtype: str) -> NDArray[Any]:
    """Return [..., N, E] of `dtype`: the entries of query rows from `first`, ready to be stored.

    Keys begin with position 0 and hold at least those up to the last query. Goes row by row: that
    takes half the time that picking the triangle by a mask does. Raises `ValueError` for a value
    that is not finite where `dtype` has none: no byte says "not a number".
    """
    queries = pattern_NQK.shape[-2]
    packed_NE = np.empty(
        (*pattern_NQK.shape[:-2], num_entries(first + queries) - num_entries(first)), DTYPES[dtype]
    )
    entry = 0
    for row in range(queries):
        seen = first + row + 1
        values_NK = pattern_NQK[..., row, :seen]
        if dtype == "uint8":
            values_NK = np.rint(values_NK.astype(np.float32) * UINT8_STEPS)
            if not np.isfinite(values_NK).all():
                raise ValueError(
                    f"the pattern of query position {first + row} is not finite, which uint8 "
                    "cannot hold: the model's rot_q or rot_k are NaN or infinite there; choose "
                    "float16, bfloat16 or float32 as the dtype of stored patterns"
                )
        packed_NE[..., entry : entry + seen] = values_NK
        entry += seen
    return packed_NE


def pack_pattern(pattern_NQK: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return [N, E] of `dtype` from square patterns, ready to be stored.

    Raises `ValueError` if a pattern is not square or not zero above its diagonal.
    """
    num_rows = pattern_NQK.shape[1]
    if pattern_NQK.ndim != 3 or pattern_NQK.shape[2] != num_rows:
        raise ValueError(f"patterns are [heads, rows, rows], got {pattern_NQK.shape}")
    if np.triu(pattern_NQK.astype(np.float32), 1).any():
        raise ValueError("only causal patterns can be packed, and this one looks ahead")
    return pack_query_rows(pattern_NQK, 0, dtype)


def unpack_pattern(packed_NE: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """Return [N, Q, K] from packed entries: their own type, or float32 probabilities of uint8."""
    if packed_NE.ndim != 2 or packed_NE.shape[1] != num_entries(num_rows):
        raise ValueError(
            f"{num_rows} rows have {num_entries(num_rows)} entries, got {packed_NE.shape}"
        )
    values_NE = packed_NE
    if packed_NE.dtype == np.uint8:
        values_NE = packed_NE.astype(np.float32) / UINT8_STEPS
    pattern_NQK = np.zeros((len(packed_NE), num_rows, num_rows), values_NE.dtype)
    pattern_NQK[:, *np.tril_indices(num_rows)] = values_NE
    return pattern_NQK


def entry_offsets(prompts: PromptOutcomes) -> NDArray[np.int64]:
    """Return each prompt's first entry on the unit's entry axis, and the total at the end."""
    stored = [outcome is Outcome.STORED for outcome in prompts.outcome]
    return entry_starts(np.where(stored, np.asarray(prompts.num_rows, np.int64), 0))
