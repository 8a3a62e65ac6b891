"""Attention scores and patterns, rebuilt in numpy from what the kernel was given.

Knows one layer's `LayerSemantics` and arrays of rows; never knows runs, objects or prompts. The
kernel never forms the score matrix, so this is the only place where it exists. All arithmetic is
float32, and queries go through in tiles: nothing of size T x T is held beyond what is asked for.

For query head h with key-value head g(h) = h // (num_heads / num_kv_heads), query position q and
key position k, in the order in which vLLM's kernels apply the steps:

    s = scale * (rot_q[h, q] . rot_k[g(h), k])
    s = cap * tanh(s / cap)                   where the layer has a logit soft-cap
    s = s + slope[h] * (k - q)                where it has ALiBi slopes (Press et al. 2022)
    s = -inf                                  unless q - W < k <= q (W: sliding window, if any)

    pattern = exp(s) / (sum over all keys of exp(s) + exp(sink[h]))

The last term is a learned sink (one extra logit per head that takes probability and gives no
value); without sinks it is absent and rows sum to 1, with them to 1 minus the sink's share.

`pattern` also takes prompts of one length together, stacked on axes before the heads: every prompt
goes through the same operations, so that its values have the same bits as alone.

Legend: N heads asked for, G key-value heads given, Q query rows, K key rows, D head size; `...` no
axis, or prompts of equal positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.run_format import LayerSemantics

Float32 = NDArray[np.float32]
Positions = NDArray[np.int64]

TILE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of some heads of one layer: `values` [..., heads, rows, D], `heads`, `positions`.

    `heads` are global; `positions` are those of every prompt that is stacked.
    """

    values: NDArray[np.generic]
    heads: Sequence[int]
    positions: Positions


def kv_head_of(semantics: LayerSemantics, head: int) -> int:
    """Return the key-value head that query head `head` reads (both global)."""
    return head * semantics.num_kv_heads // semantics.num_heads


def scores(
    semantics: LayerSemantics, rot_q: HeadRows, rot_k: HeadRows, keys: Positions | None = None
) -> Float32:
    """Return attention scores before the softmax, float32 [N, Q, K]; masked entries are -inf.

    `rot_q` holds the query heads and positions asked for; `rot_k` the key-value heads they need.
    `keys` are indices into `rot_k`'s rows, all of them if None. Raises `ValueError` where a needed
    key-value head is not in `rot_k`.
    """
    columns = np.arange(len(rot_k.positions)) if keys is None else keys
    out_NQK = np.empty((len(rot_q.heads), len(rot_q.positions), len(columns)), np.float32)
    kept = HeadRows(rot_k.values[:, columns], rot_k.heads, rot_k.positions[columns])
    for places, rows, tile_NQK in _score_tiles(semantics, rot_q, kept):
        out_NQK[places, rows] = tile_NQK
    return out_NQK


def pattern(
    semantics: LayerSemantics, rot_q: HeadRows, rot_k: HeadRows, keys: Positions | None = None
) -> Float32:
    """Return the attention pattern, float32 [..., N, Q, K]; the softmax takes all rows of `rot_k`.

    `rot_k` must hold every position that a query can see, else the denominators would be wrong:
    `ValueError`. `keys` picks the columns that are returned (indices into `rot_k`'s rows) and does
    not change the values. Rows of layers with sinks sum to less than 1 and are not renormalised.
    """
    _require_every_key(semantics, rot_q.positions, rot_k.positions)
    columns = slice(None) if keys is None else keys
    num_columns = len(rot_k.positions) if keys is None else len(keys)
    stacked = rot_q.values.shape[:-3]
    out_NQK = np.empty((*stacked, len(rot_q.heads), len(rot_q.positions), num_columns), np.float32)
    for places, rows, tile_NQK in _score_tiles(semantics, rot_q, rot_k):
        sinks = None if semantics.sinks is None else _by_head(semantics.sinks, rot_q.heads, places)
        _softmax_in_place(tile_NQK, sinks)
        out_NQK[..., places, rows, :] = tile_NQK[..., columns]
    return out_NQK


def _score_tiles(
    semantics: LayerSemantics, rot_q: HeadRows, rot_k: HeadRows
) -> Iterator[tuple[list[int], slice, Float32]]:
    """Yield (places of heads that share keys, query rows, scores [..., n, rows, K]), by tiles.

    The heads of one key-value head go through one matrix product; a tile has at most `TILE_BYTES`
    of one prompt.
    """
    place_of_kv_head = {head: place for place, head in enumerate(rot_k.heads)}
    sharing: dict[int, list[int]] = {}
    for place, head in enumerate(rot_q.heads):
        kv_head = kv_head_of(semantics, head)
        if kv_head not in place_of_kv_head:
            raise ValueError(
                f"head {head} reads kv head {kv_head}, but only {list(rot_k.heads)} are given"
            )
        sharing.setdefault(kv_head, []).append(place)
    num_keys = len(rot_k.positions)
    for kv_head, places in sharing.items():
        k_KD = np.asarray(rot_k.values[..., place_of_kv_head[kv_head], :, :], np.float32)
        tile_rows = max(1, TILE_BYTES // (4 * max(1, num_keys) * len(places)))
        for start in range(0, len(rot_q.positions), tile_rows):
            rows = slice(start, start + tile_rows)
            q_NQD = np.asarray(rot_q.values[..., places, rows, :], np.float32)
            *stacked, _, num_queries, head_size = q_NQD.shape
            # Contiguous: the product of strided rows with a single key has other bits.
            flat_RD = np.ascontiguousarray(
                q_NQD.reshape(*stacked, len(places) * num_queries, head_size)
            )
            scores_NQK = (flat_RD @ k_KD.swapaxes(-1, -2)).reshape(
                *stacked, len(places), num_queries, num_keys
            )
            q_pos = rot_q.positions[rows]
            slopes = semantics.alibi_slopes
            slopes_N11 = None if slopes is None else _by_head(slopes, rot_q.heads, places)
            _finish_scores(semantics, scores_NQK, slopes_N11, q_pos, rot_k.positions)
            yield places, rows, scores_NQK


def _finish_scores(
    semantics: LayerSemantics,
    scores_NQK: Float32,
    slopes_N11: Float32 | None,
    q_pos: Positions,
    k_pos: Positions,
) -> None:
    """Scale, cap, bias and mask dot products, in place and in that order."""
    scores_NQK *= np.float32(semantics.scale)
    if semantics.logit_softcap:
        cap = np.float32(semantics.logit_softcap)
        np.tanh(scores_NQK / cap, out=scores_NQK)
        scores_NQK *= cap
    distance_QK = k_pos[None, :] - q_pos[:, None]
    if slopes_N11 is not None:
        scores_NQK += slopes_N11 * distance_QK.astype(np.float32)
    hidden_QK = distance_QK > 0
    if semantics.sliding_window is not None:
        hidden_QK |= distance_QK <= -semantics.sliding_window
    np.copyto(scores_NQK, np.float32(-np.inf), where=hidden_QK)


def _softmax_in_place(scores_NQK: Float32, sinks_N11: Float32 | None) -> None:
    if scores_NQK.size == 0:
        return
    top_NQ1 = scores_NQK.max(axis=-1, keepdims=True)
    if sinks_N11 is not None:
        top_NQ1 = np.maximum(top_NQ1, sinks_N11)
    scores_NQK -= top_NQ1
    np.exp(scores_NQK, out=scores_NQK)
    total_NQ1 = scores_NQK.sum(axis=-1, keepdims=True)
    if sinks_N11 is not None:
        total_NQ1 += np.exp(sinks_N11 - top_NQ1)
    scores_NQK /= total_NQ1


def _by_head(values: Sequence[float], heads: Sequence[int], places: Sequence[int]) -> Float32:
    """Return the values of the heads at these places, ready to meet [N, Q, K]."""
    picked = [values[heads[place]] for place in places]
    return np.asarray(picked, np.float32)[:, None, None]


def _require_every_key(semantics: LayerSemantics, q_pos: Positions, k_pos: Positions) -> None:
    if len(q_pos) == 0:
        return
    window = semantics.sliding_window
    first = 0 if window is None else max(0, int(q_pos.min()) - window + 1)
    last = int(q_pos.max())
    have = np.unique(k_pos[(k_pos >= first) & (k_pos <= last)])
    if len(have) != last - first + 1:
        raise ValueError(
            f"a pattern up to position {last} needs the keys of all positions {first}..{last}, "
            f"got {len(have)} of them"
        )
