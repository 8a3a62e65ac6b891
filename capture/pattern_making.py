"""Patterns of prompts by `store.attention`, the reader's own arithmetic, as packed entries.

A long prompt goes tile by tile of query rows, so that no square of it is ever held. Short prompts
of one length go through the same operations together: with 64 tokens and less, calling numpy takes
longer than computing. Nothing is padded, since a sum over more keys adds them in another order:
every entry has the bits that it has when its prompt is made alone. It knows neither units nor
shards, no torch and no engine.

Shape legend: B prompts of one length, N local heads, G local key-value heads, Q query rows of a
tile, K keys, E entries, T rows of a prompt, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from store.attention import HeadRows, pattern
from store.packed_pattern import num_entries, pack_query_rows
from store.run_format import LayerSemantics

TILE_BYTES = 8 << 20
"""Of a tile's probabilities, float32; one query row of all heads at the least."""

BATCH_BYTES = 1 << 20
"""Of prompts made together, their probabilities or their query rows, float32; one at the least."""


def make_pattern(
    semantics: LayerSemantics,
    q: HeadRows,
    k: HeadRows,
    dtype: str,
    tile_bytes: int = TILE_BYTES,
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Yield (first entry, packed [N, E] of `dtype`) of one prompt's pattern, rows in order.

    `q` and `k` hold every row of the prompt.
    """
    num_heads, num_rows = q.values.shape[:2]
    first = 0
    while first < num_rows:
        # The keys of a tile end with its last query: as many rows as fit if all saw that many.
        rows = max(1, tile_bytes // (4 * num_heads * (first + 1)))
        rows = max(1, tile_bytes // (4 * num_heads * min(num_rows, first + rows)))
        end = min(num_rows, first + rows)
        start = 0 if semantics.sliding_window is None else first - semantics.sliding_window + 1
        keys = slice(max(0, start), end)
        queries = HeadRows(q.values[:, first:end], q.heads, q.positions[first:end])
        given = HeadRows(k.values[:, keys], k.heads, k.positions[keys])
        tile_NQK = pattern(semantics, queries, given)
        if keys.start:
            seen_NQK = np.zeros((num_heads, end - first, end), np.float32)
            seen_NQK[:, :, keys] = tile_NQK
            tile_NQK = seen_NQK
        yield num_entries(first), pack_query_rows(tile_NQK, first, dtype)
        first = end


def fits_one_tile(num_heads: int, num_rows: int, tile_bytes: int = TILE_BYTES) -> bool:
    """Return whether `make_pattern` makes a prompt of so many rows in one tile."""
    return 4 * num_heads * num_rows * num_rows <= tile_bytes


def make_batch(
    semantics: LayerSemantics, q_BNTD: HeadRows, k_BGTD: HeadRows, dtype: str
) -> np.ndarray[Any, Any]:
    """Return packed [B, N, E] of `dtype` of whole prompts of one length, each as if alone."""
    return pack_query_rows(pattern(semantics, q_BNTD, k_BGTD), 0, dtype)


def batches(
    lengths: Sequence[int], num_heads: int, head_size: int, batch_bytes: int = BATCH_BYTES
) -> Iterator[list[int]]:
    """Yield the places of prompts that are made together: of one length, within `batch_bytes`."""
    places_of: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        places_of.setdefault(length, []).append(place)
    for length, places in places_of.items():
        size = max(1, batch_bytes // (4 * num_heads * length * max(length, head_size)))
        for start in range(0, len(places), size):
            yield places[start : start + size]
