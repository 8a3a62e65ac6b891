"""What each head does, as one number per query: the scores that name induction heads and the like.

Knows pattern rows and the prompt's token ids; never knows a run. Each score is a share of
attention (0 to 1), or an entropy in nats, for every query where it is defined; `store.reductions`
takes the mean over queries and prompts. Definitions follow Olsson et al. 2022, "In-context Learning
and Induction Heads", and Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

Legend: N heads, Q queries of a tile, K keys (all positions from 0).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.errors import SelectionError
from store.selection import integers

Float32 = NDArray[np.float32]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

MAX_TOKEN_ID = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some query rows of every head's pattern [N, Q, K], and the tokens [K] of the prompt."""

    pattern: Float32
    queries: Indices
    token_ids: NDArray[np.int32]


Scorer = Callable[[Tile], tuple[Float32, Mask]]
"""Returns ([N, Q] scores, [Q] which queries count)."""


def induction(tile: Tile) -> tuple[Float32, Mask]:
    """Attention to the tokens that followed earlier occurrences of the query's own token.

    Counts queries whose token occurred before, with another token after it than the query itself.
    """
    # Column k is a target of query q if the token before it, k - 1, is the query's token, k < q.
    before_K = np.concatenate([[-1], tile.token_ids[:-1].astype(np.int64)])
    return _attention_to(tile, before_K[None, :] == _own(tile))


def duplicate_token(tile: Tile) -> tuple[Float32, Mask]:
    """Attention to earlier occurrences of the query's own token. Counts queries that have one."""
    return _attention_to(tile, tile.token_ids[None, :].astype(np.int64) == _own(tile))


def previous_token(tile: Tile) -> tuple[Float32, Mask]:
    """Attention to the position just before the query. Counts every query but the first."""
    keys = np.arange(len(tile.token_ids))
    return _attention_to(tile, keys[None, :] == tile.queries[:, None] - 1)


def first_token(tile: Tile) -> tuple[Float32, Mask]:
    """Attention to position 0, where many heads rest. Counts every query but the first."""
    keys = np.arange(len(tile.token_ids))
    return _attention_to(tile, np.broadcast_to(keys == 0, (len(tile.queries), len(keys))))


def current_token(tile: Tile) -> tuple[Float32, Mask]:
    """Attention of a query to itself. Counts every query but the first, which has no choice."""
    scores = np.take_along_axis(tile.pattern, tile.queries[None, :, None], axis=2)[..., 0]
    return scores, tile.queries > 0


def entropy(tile: Tile) -> tuple[Float32, Mask]:
    """Entropy of the query's pattern in nats: 0 where one key takes all. Counts every query."""
    p = tile.pattern
    logs = np.log(p, out=np.zeros_like(p), where=p > 0)
    return -(p * logs).sum(axis=2), np.ones(len(tile.queries), bool)


SCORERS: dict[str, Scorer] = {
    "induction": induction,
    "duplicate_token": duplicate_token,
    "previous_token": previous_token,
    "first_token": first_token,
    "current_token": current_token,
    "entropy": entropy,
}


def scorer(kind: str) -> Scorer:
    """Return the score called `kind`. Raises `ValueError` naming the nearest and all of them."""
    found = SCORERS.get(kind.replace("-", "_"))
    if found is None:
        near = difflib.get_close_matches(kind, SCORERS, 1, 0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no head score {kind!r}; {hint}there are {', '.join(SCORERS)}")
    return found


def attention_to_tokens(token_ids: Sequence[int] | Indices) -> Scorer:
    """Return a score: attention to earlier keys whose token is one of `token_ids`.

    Raises `TypeError` for what is no list of integers, `SelectionError` for what no token can be.
    """
    if isinstance(token_ids, (bytes, bytearray)):
        raise TypeError(f"tokens={token_ids!r}: give a list of token ids, or a str to match")
    numbers = integers("tokens", token_ids)
    for number in numbers:
        if not 0 <= number <= MAX_TOKEN_ID:
            raise SelectionError(f"there is no token id {number}; they go from 0 to {MAX_TOKEN_ID}")
    wanted = np.unique(np.asarray(numbers, np.int64))

    def score(tile: Tile) -> tuple[Float32, Mask]:
        is_wanted_K = np.isin(tile.token_ids, wanted)
        shape = (len(tile.queries), len(tile.token_ids))
        return _attention_to(tile, np.broadcast_to(is_wanted_K, shape))

    return score


def _own(tile: Tile) -> Indices:
    """Return the queries' own token ids as a column."""
    return tile.token_ids[tile.queries].astype(np.int64)[:, None]


def _attention_to(tile: Tile, targets_QK: Mask) -> tuple[Float32, Mask]:
    """Sum the attention to target keys strictly before the query; count queries that have any."""
    keys = np.arange(len(tile.token_ids))
    earlier_QK = targets_QK & (keys[None, :] < tile.queries[:, None])
    scores = np.einsum("nqk,qk->nq", tile.pattern, earlier_QK.astype(np.float32))
    return scores, np.asarray(earlier_QK.any(axis=1), bool)
