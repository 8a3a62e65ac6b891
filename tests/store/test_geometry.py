"""The cut of an array: within its bounds, without gaps or overlaps, and exact for any shape."""

from __future__ import annotations

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import store.zarr_bfloat16  # noqa: F401
from store.codec import Codec
from store.errors import FormatError
from store.geometry import MAX_CHUNK_BYTES, MAX_SHARD_BYTES, ArrayGeometry
from store.objects.local import LocalStore
from store.shard_index import ABSENT, raw_chunk_sizes, shard_index
from tests.store.committed_values import assert_same_values, committed_values
from tests.store.sample_run import SampleShape, capture, make_unit
from tests.store.sample_run import array_record as record_of

PLANS = st.builds(
    ArrayGeometry.plan,
    num_layers=st.integers(1, 4),
    num_tokens=st.integers(0, 5000),
    num_heads=st.just(48),
    shard_heads=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 48]),
    head_size=st.sampled_from([1, 4, 64, 80, 96, 128, 192, 256, 512, 4096, 300_000]),
    item_bytes=st.sampled_from([1, 2, 4]),
    max_shard_bytes=st.sampled_from([64 << 10, 1 << 20, MAX_SHARD_BYTES]),
)


@settings(max_examples=300, deadline=None)
@given(PLANS)
def test_the_cut_keeps_its_bounds_and_covers_every_token_once(plan):
    assert plan.shard_tokens % 256 == 0
    assert plan.shard_heads % plan.group_heads == 0
    one_head = plan.head_size * plan.item_bytes
    assert plan.chunk_bytes <= max(MAX_CHUNK_BYTES, one_head)
    assert plan.chunk_tokens == 256 or 2 * plan.chunk_tokens * one_head > MAX_CHUNK_BYTES
    if plan.group_heads < plan.shard_heads:
        larger = next(
            g
            for g in range(plan.group_heads + 1, plan.shard_heads + 1)
            if plan.shard_heads % g == 0
        )
        assert larger * plan.chunk_tokens * one_head > MAX_CHUNK_BYTES
    tokens = [plan.tokens_in_shard(shard) for shard in range(plan.num_token_shards)]
    assert sum(tokens) == plan.num_tokens
    assert all(0 < held <= plan.shard_tokens for held in tokens)
    assert len(list(plan.shard_places())) == len(plan.shard_coordinates())


@settings(max_examples=200, deadline=None)
@given(PLANS.filter(lambda plan: plan.num_tokens > 0))
def test_a_raw_shards_index_is_the_implied_one(plan):
    for shard in {0, plan.num_token_shards - 1}:
        index = shard_index(plan, shard, raw_chunk_sizes(plan, shard))
        assert len(index) == plan.index_bytes
        grid = np.frombuffer(index[:-4], "<u8")
        grid = grid.reshape(plan.token_chunks_per_shard, plan.groups_per_shard, 2)
        chunks = plan.token_chunks_in_shard(shard)
        for chunk in {0, chunks - 1}:
            for group in {0, plan.groups_per_shard - 1}:
                assert grid[chunk, group].tolist() == [
                    plan.raw_chunk_offset(shard, group, chunk), plan.chunk_bytes + 4,
                ]  # fmt: skip
        assert (grid[chunks:] == ABSENT).all()
        end = plan.raw_chunk_offset(shard, plan.groups_per_shard - 1, chunks - 1)
        assert end + plan.raw_chunk_stride + len(index) == plan.raw_shard_bytes(shard)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    codec=st.sampled_from(Codec),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    size=st.sampled_from([1, 3, 16, 80]),
    heads=st.sampled_from([(1, 1), (6, 3), (8, 2), (9, 3)]),
)
def test_any_unit_is_exact_to_us_and_to_zarr_python(
    tmp_path_factory, data, codec, dtype, lengths, size, heads
):
    ranks = data.draw(st.sampled_from([r for r in (1, 2, 3) if heads[0] % r == 0]))
    shape = SampleShape(
        num_layers=2, num_heads=heads[0], num_kv_heads=heads[1], head_size=size, ranks=ranks,
        dtype=dtype, codec=codec, max_shard_bytes=48 << 10,
        sites=("rot_k", "z") if heads[1] % ranks == 0 else ("z",),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("unit")
    objects = LocalStore(folder)
    sample = make_unit(shape, 0, 0, lengths, seed=3)
    assert capture(objects, shape, sample).won
    if not sum(lengths):
        return
    assert_same_values(committed_values(objects, "commits/000000/00000000.json"), sample.arrays)
    group = zarr.open_group(folder / "data/00000000/a0", mode="r")
    for site, truth in sample.arrays.items():
        assert group[site][:].tobytes() == truth.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"shard_heads": 3}, {"group_heads": 3}, {"shard_tokens": 300}, {"chunk_tokens": 0},
        {"num_tokens": -1}, {"head_size": 0}, {"chunk_tokens": 1 << 27, "shard_tokens": 1 << 27},
    ],
)  # fmt: skip
def test_a_cut_that_does_not_fit_together_is_refused(change):
    fields = {
        "num_layers": 2, "num_tokens": 700, "num_heads": 8, "head_size": 16, "item_bytes": 2,
        "shard_tokens": 512, "shard_heads": 4, "chunk_tokens": 256, "group_heads": 4,
    }  # fmt: skip
    ArrayGeometry(**fields)
    with pytest.raises(ValueError, match=r"must|above"):
        ArrayGeometry(**{**fields, **change})


def test_a_record_that_does_not_fit_together_is_a_format_error():
    shape = SampleShape()
    good = record_of(shape, "z", shape.geometry("z", 700), {})
    assert good.geometry() == shape.geometry("z", 700)
    with pytest.raises(FormatError, match="array z"):
        good.model_copy(update={"group_heads": 3}).geometry()
