"""Ranks' shares make up all heads, in order, each written once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import CaptureError, UnsupportedModel
from capture.heads import head_group, head_share, head_slices, select_heads


@pytest.mark.parametrize(
    ("total", "ranks"), [(9, 1), (9, 3), (3, 3), (8, 2), (8, 8), (2, 4), (1, 8), (2, 8)]
)
def test_every_head_is_written_once_and_in_order(total: int, ranks: int) -> None:
    local = max(1, total // ranks)
    shares = [head_share(total, local, rank, ranks) for rank in range(ranks)]
    written = [head for share in shares if share.writes for head in share.held]
    assert written == list(range(total))
    places = [share.shard for share in shares if share.writes]
    assert places == list(range(len(places)))


def test_replicas_hold_the_kv_head_that_their_query_heads_read() -> None:
    for rank in range(8):
        queries, keys = head_share(16, 2, rank, 8), head_share(4, 1, rank, 8)
        assert {head * 4 // 16 for head in queries.held} == set(keys.held)


@pytest.mark.parametrize(("total", "local", "ranks"), [(9, 4, 2), (3, 1, 2), (8, 8, 2), (3, 1, 4)])
def test_uneven_heads_are_refused(total: int, local: int, ranks: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"{total} heads"):
        head_share(total, local, 0, ranks)


@st.composite
def selections(draw) -> tuple[list[int], int, int, int, int]:
    """Wanted heads of a model that vLLM can split: heads, KV heads, ranks, bytes of a head."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    if draw(st.booleans()):
        kv_heads = ranks * draw(st.integers(1, 4))
    else:
        kv_heads = draw(st.sampled_from([k for k in range(1, ranks + 1) if ranks % k == 0]))
    sharing = draw(st.integers(1, 8)) * max(1, ranks // kv_heads)
    heads = kv_heads * sharing
    wanted = draw(st.lists(st.integers(0, heads - 1), min_size=1, unique=True))
    return wanted, heads, kv_heads, ranks, draw(st.sampled_from([64, 256, 512, 1024, 4096]))


@given(selections())
def test_a_selection_is_whole_groups_equally_many_on_every_rank(selection) -> None:
    wanted, heads, kv_heads, ranks, head_bytes = selection
    held = select_heads(wanted, heads, kv_heads, ranks, head_bytes)
    size = head_group(heads, kv_heads, ranks, head_bytes)
    local, sharing = heads // ranks, heads // kv_heads
    stored = [head for one in held for head in one.query]
    assert set(wanted) <= set(stored)
    assert stored == sorted(set(stored))
    assert len({len(one.query) for one in held}) == 1
    assert len({len(one.kv) for one in held}) == 1
    needed = 0
    for rank, one in enumerate(held):
        assert set(one.query) <= set(range(rank * local, (rank + 1) * local))
        assert {head // size for head in one.query} == {g // size for g in one.query[::size]}
        assert len(one.query) == len({head // size for head in one.query}) * size
        assert {head // sharing for head in one.query} <= set(one.kv)
        own = {head // size for head in wanted if head // local == rank}
        needed = max(needed, len(own))
        kv_local = max(1, kv_heads // ranks)
        first = rank * kv_heads // ranks
        assert set(one.kv) <= set(range(first, first + kv_local))
        assert list(one.kv) == sorted(set(one.kv))
    assert len(held[0].query) == needed * size, "no rank holds more groups than the fullest needs"
    assert size == 1 or size * 256 * head_bytes <= 384 << 10


@given(selections())
def test_slices_stage_the_held_heads_and_no_others(selection) -> None:
    wanted, heads, kv_heads, ranks, head_bytes = selection
    for rank, one in enumerate(select_heads(wanted, heads, kv_heads, ranks, head_bytes)):
        share = head_share(heads, heads // ranks, rank, ranks, one.query)
        assert share.num_held == len(one.query) * ranks
        for group in (g for g in range(1, len(one.query) + 1) if len(one.query) % g == 0):
            staged = [-1] * len(one.query)
            for piece in head_slices(share, group):
                assert piece.count % group == 0 or piece.staged % group + piece.count <= group
                for at in range(piece.count):
                    assert staged[piece.staged + at] == -1
                    staged[piece.staged + at] = share.first + piece.local + at
            assert staged == list(one.query)


def test_all_heads_are_one_slice() -> None:
    assert len(head_slices(head_share(32, 16, 1, 2), 4)) == 1


@pytest.mark.parametrize(
    ("model", "ranks", "wanted", "query", "kv"),
    [
        # 8 heads over 2 KV heads: one head takes the four that share its KV head.
        ((8, 2, 128), 1, [1], [[0, 1, 2, 3]], [[0]]),
        # The other rank is filled up with a group of its own.
        ((8, 2, 128), 2, [1], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0], [1]]),
        # A KV head of 8 query heads of 256 bytes is cut into groups of 4: chunks stay in bounds.
        ((64, 8, 256), 1, [9, 40], [[8, 9, 10, 11, 40, 41, 42, 43]], [[1, 5]]),
        # Filled up beside what is held: group 1 reads the KV head that group 0 reads.
        ((32, 4, 256), 2, [2, 16, 20], [[*range(8)], [*range(16, 24)]], [[0], [2]]),
        # One KV head on two ranks each; each rank holds its half of the group.
        ((8, 2, 128), 4, [0], [[0, 1], [2, 3], [4, 5], [6, 7]], [[0], [0], [1], [1]]),
        # One KV head for all: a head stays alone where its number is prime.
        ((7, 1, 256), 1, [5], [[5]], [[0]]),
    ],
)
def test_the_rule_by_example(model, ranks, wanted, query, kv) -> None:
    heads, kv_heads, head_bytes = model
    held = select_heads(wanted, heads, kv_heads, ranks, head_bytes)
    assert [list(one.query) for one in held] == query
    assert [list(one.kv) for one in held] == kv


@pytest.mark.parametrize("wanted", [[8], [-1], []])
def test_a_head_that_the_model_has_not_is_named(wanted: list[int]) -> None:
    with pytest.raises(CaptureError, match="query heads 0 to 7"):
        select_heads(wanted, 8, 2, 1, 128)
