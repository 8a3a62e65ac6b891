"""Ranks' shares make up all heads, in order, each written once."""

from __future__ import annotations

import pytest

from capture.errors import UnsupportedModel
from capture.heads import head_share


@pytest.mark.parametrize(
    ("total", "ranks"), [(9, 1), (9, 3), (3, 3), (8, 2), (8, 8), (2, 4), (1, 8), (2, 8)]
)
def test_every_head_is_written_once_and_in_order(total: int, ranks: int) -> None:
    local = max(1, total // ranks)
    shares = [head_share(total, local, rank, ranks) for rank in range(ranks)]
    written = [head for share in shares if share.writes for head in share.heads]
    assert written == list(range(total))
    places = [share.shard for share in shares if share.writes]
    assert places == list(range(len(places)))


def test_replicas_hold_the_kv_head_that_their_query_heads_read() -> None:
    for rank in range(8):
        queries, keys = head_share(16, 2, rank, 8), head_share(4, 1, rank, 8)
        assert {head * 4 // 16 for head in queries.heads} == set(keys.heads)


@pytest.mark.parametrize(("total", "local", "ranks"), [(9, 4, 2), (3, 1, 2), (8, 8, 2), (3, 1, 4)])
def test_uneven_heads_are_refused(total: int, local: int, ranks: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"{total} heads"):
        head_share(total, local, 0, ranks)
