"""Packed patterns: the triangle and nothing else, through the format and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import zarr

import store.zarr_bfloat16  # noqa: F401
from store import keys
from store.attempt import AttemptWriter
from store.codec import Codec
from store.commit import commit_unit
from store.errors import CommitRefused
from store.objects.local import LocalStore
from store.packed_pattern import (
    UINT8_WORST_ERROR,
    entry_offsets,
    num_entries,
    pack_pattern,
    plan_pattern,
    unpack_pattern,
)
from store.run_format import ArrayRecord, Commit, Outcome, PromptOutcomes
from store.shard import encode_shard
from store.shard_index import pack_chunk_sizes
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, write_manifests

LAYERS, HEADS = 2, 4


def causal(rows: int, seed: int = 0, heads: int = HEADS) -> np.ndarray:
    scores = np.random.default_rng([seed, rows]).standard_normal((heads, rows, rows)) * 3
    weights = np.tril(np.exp(scores))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_triangle_comes_back_bit_for_bit(rows, dtype):
    kind = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    pattern = causal(rows).astype(kind)
    packed = pack_pattern(pattern, dtype)
    assert packed.shape == (HEADS, num_entries(rows))
    assert packed[1, 0] == pattern[1, 0, 0]
    assert packed[1, -1] == pattern[1, -1, -1]
    assert unpack_pattern(packed, rows).tobytes() == pattern.tobytes()


def test_bytes_are_off_by_at_most_the_stated_error():
    pattern = causal(64)
    error = np.abs(unpack_pattern(pack_pattern(pattern, "uint8"), 64) - pattern).max()
    assert 0 < error <= UINT8_WORST_ERROR + 1e-7


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_never_a_byte(bad):
    pattern_NQK = np.tril(np.full((2, 3, 3), 0.5, np.float32))
    pattern_NQK[1, 2, 1] = bad
    with pytest.raises(ValueError, match="query position 2 is not finite"):
        pack_pattern(pattern_NQK, "uint8")
    for dtype in ("float16", "bfloat16", "float32"):
        packed_NE = pack_pattern(pattern_NQK, dtype)
        assert not np.isfinite(unpack_pattern(packed_NE, 3)[1, 2, 1])


def test_what_is_no_causal_pattern_is_refused():
    with pytest.raises(ValueError, match="looks ahead"):
        pack_pattern(np.ones((1, 3, 3), np.float32), "float32")
    with pytest.raises(ValueError, match="rows"):
        pack_pattern(np.zeros((1, 3, 4), np.float32), "float32")
    with pytest.raises(ValueError, match="6 entries"):
        unpack_pattern(np.zeros((1, 5), np.float32), 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
@pytest.mark.parametrize("codec", [Codec.RAW, Codec.FAST])
def test_a_unit_of_packed_patterns(tmp_path, dtype, codec):
    lengths, shape = [300, 0, 70], SampleShape()
    objects = LocalStore(tmp_path)
    write_manifests(objects, shape, [lengths])
    prompts = PromptOutcomes(
        outcome=[Outcome.STORED, Outcome.FAILED, Outcome.STORED],
        first_row=[0, 300, 300], num_rows=lengths, first_position=[0, 0, 0],
        reasons={"1": "empty prompt"},
    )  # fmt: skip
    offsets = entry_offsets(prompts)
    patterns = [[causal(n, layer) for n in lengths if n] for layer in range(LAYERS)]
    truth_LHE = np.stack(
        [np.concatenate([pack_pattern(p, dtype) for p in layer], 1) for layer in patterns]
    )
    assert truth_LHE.shape[2] == offsets[-1] == num_entries(300) + num_entries(70)
    geometry = plan_pattern(
        num_layers=LAYERS, entries=int(offsets[-1]), num_heads=HEADS, shard_heads=2, dtype=dtype
    )
    writer = AttemptWriter(objects, 0, "a0", run_id=RUN_ID)
    array = ArrayRecord.of(
        geometry, site="pattern", dtype=dtype, dims=["layer", "head", "entry"], layers=[0, 1],
        heads=list(range(HEADS)), codec=codec,
    )  # fmt: skip
    records, sizes = [], {}
    for layer, entry_shard, head_shard in geometry.shard_places():
        entries = slice(
            entry_shard * geometry.shard_tokens, (entry_shard + 1) * geometry.shard_tokens
        )
        data = truth_LHE[layer, head_shard * 2 : head_shard * 2 + 2, entries, None]
        key = writer.shard_key("pattern", (layer, head_shard, entry_shard))
        encoded = encode_shard(geometry, entry_shard, data, codec, key)
        records.append(writer.put_shard(encoded))
        sizes[records[-1].name] = pack_chunk_sizes(encoded.chunk_sizes)
    if codec is not Codec.RAW:
        array = array.model_copy(update={"chunk_sizes": sizes})
    records += writer.put_metadata([array])
    commit = Commit(
        run_id=RUN_ID, unit=0, attempt="a0", first_prompt=0, prompts=prompts, arrays=[array],
        objects=records, ranks=[],
    )  # fmt: skip
    short = array.model_copy(update={"num_tokens": array.num_tokens - 1})
    with pytest.raises(CommitRefused, match="entries"):
        commit_unit(objects, commit.model_copy(update={"arrays": [short]}))
    assert commit_unit(objects, commit).won
    assert verify_run(objects, deep=True).problems == []
    stored = zarr.open_array(tmp_path / keys.attempt_prefix(0, "a0") / "pattern", mode="r")
    assert stored[:].tobytes() == truth_LHE.tobytes()
    assert stored.metadata.dimension_names == ("layer", "head", "entry")
    assert ("worst_error" in stored.attrs) == (dtype == "uint8")
    second = unpack_pattern(np.asarray(stored[1, :, offsets[2] : offsets[3]]), 70)
    assert np.abs(second.astype(np.float32) - patterns[1][1]).max() < 5e-3
