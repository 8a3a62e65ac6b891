"""Stored patterns through the reader: the same call as for rebuilt ones, entry by entry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store import keys, reductions
from store.attempt import AttemptWriter
from store.codec import Codec
from store.commit import commit_unit, read_commit
from store.errors import DamagedObject, SiteNotFound
from store.objects.local import LocalStore
from store.packed_pattern import UINT8_WORST_ERROR, entry_offsets, pack_pattern, plan_pattern
from store.run import Run, open_run
from store.run_format import ArrayRecord, Commit, Outcome, PromptOutcomes
from store.shard import encode_shard
from store.shard_index import pack_chunk_sizes
from tests.store.sample_run import RUN_ID, SampleShape, write_manifests

LENGTHS = [300, 0, 70]
LAYERS, HEADS = 2, 4
Array = np.ndarray[Any, Any]


def causal(rows: int, seed: int) -> Array:
    weights = np.tril(np.exp(np.random.default_rng([seed, rows]).standard_normal((4, rows, rows))))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def write(objects: LocalStore, dtype: str) -> dict[str, Array]:
    """Write one unit that holds patterns and nothing else; return prompt -> [L, N, Q, K]."""
    write_manifests(objects, SampleShape(), [LENGTHS])
    prompts = PromptOutcomes(
        outcome=[Outcome.STORED, Outcome.FAILED, Outcome.STORED],
        first_row=[0, 300, 300], num_rows=LENGTHS, first_position=[0, 0, 0],
        reasons={"1": "empty prompt"},
    )  # fmt: skip
    truth = {
        f"p{i}": np.stack([causal(n, layer) for layer in range(LAYERS)])
        for i, n in enumerate(LENGTHS)
        if n
    }
    packed = [
        np.concatenate([pack_pattern(truth[p][layer], dtype) for p in truth], axis=1)
        for layer in range(LAYERS)
    ]
    geometry = plan_pattern(
        num_layers=LAYERS, entries=int(entry_offsets(prompts)[-1]), num_heads=HEADS,
        shard_heads=2, dtype=dtype,
    )  # fmt: skip
    writer = AttemptWriter(objects, 0, "a0", run_id=RUN_ID)
    records, sizes = [], {}
    for layer, entry_shard, head_shard in geometry.shard_places():
        first = entry_shard * geometry.shard_tokens
        data = packed[layer][
            head_shard * 2 : head_shard * 2 + 2, first : first + geometry.shard_tokens, None
        ]
        key = writer.shard_key("pattern", (layer, head_shard, entry_shard))
        encoded = encode_shard(geometry, entry_shard, np.ascontiguousarray(data), Codec.FAST, key)
        records.append(writer.put_shard(encoded))
        sizes[records[-1].name] = pack_chunk_sizes(encoded.chunk_sizes)
    array = ArrayRecord.of(
        geometry, site="pattern", dtype=dtype, dims=["layer", "head", "entry"], layers=[0, 1],
        heads=list(range(HEADS)), codec=Codec.FAST, chunk_sizes=sizes,
    )  # fmt: skip
    records += writer.put_metadata([array])
    commit = Commit(
        run_id=RUN_ID, unit=0, attempt="a0", first_prompt=0, prompts=prompts, arrays=[array],
        objects=records, ranks=[],
    )  # fmt: skip
    assert commit_unit(objects, commit).won
    return truth


@pytest.fixture(scope="module", params=["float32", "bfloat16", "uint8"])
def sample(request, tmp_path_factory) -> tuple[Run, dict[str, Array], float]:
    folder = tmp_path_factory.mktemp("patterns")
    truth = write(LocalStore(folder), request.param)
    error = {"float32": 0.0, "bfloat16": 2**-9, "uint8": UINT8_WORST_ERROR + 1e-7}[request.param]
    return open_run(str(folder)), truth, error


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_part_is_that_part_of_what_was_stored(sample, data: st.DataObject) -> None:
    run, truth, error = sample
    prompt = data.draw(st.sampled_from(sorted(truth)))
    whole = truth[prompt]
    picks = [
        data.draw(st.lists(st.integers(0, size - 1), max_size=5, unique=True))
        for size in whole.shape
    ]
    layer, head, query, key = picks
    got = run.pattern(prompt, layer, head, query=query, key=key)
    assert got.dims == ("layer", "head", "query_pos", "key_pos")
    assert got.dtype == np.float32
    np.testing.assert_allclose(got.values, whole[np.ix_(*picks)], atol=error, rtol=0)


def test_it_is_the_same_call_with_the_same_labels(sample) -> None:
    run, truth, error = sample
    assert run.sites == ("pattern",)
    got = run.pattern("p2", 1, 3)
    assert got.dims == ("query_pos", "key_pos")
    assert got.query_token.values.tolist() == [f"t{i}" for i in range(70)]
    np.testing.assert_allclose(got.values, truth["p2"][1, 3], atol=error, rtol=0)
    assert run.read("blocks.1.attn.hook_pattern", prompt="p2", head=3).identical(got)
    assert run.cache("p2", batch_dim=False)["pattern", 1].shape == (4, 70, 70)
    cost = run.explain("pattern", prompt="p0", layer=0, head=0, pos=slice(0, 8))
    assert (cost.calls, cost.chunks) == (1, 1)
    with pytest.raises(SiteNotFound, match="rebuilt from rot_q and rot_k"):
        run.scores("p2", 1, 3)


def test_a_damaged_pattern_raises(tmp_path) -> None:
    write(LocalStore(tmp_path), "uint8")
    path = next((tmp_path / "data").rglob("pattern/c/0/0/0"))
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(DamagedObject, match="crc32c"):
        open_run(str(tmp_path)).pattern("p0", 0, 0)


def test_a_pattern_of_another_place_raises(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    write(objects, "float32")
    commit = read_commit(objects, keys.commit_key(0))
    (array,) = commit.arrays
    geometry = array.geometry()
    assert geometry.num_token_shards == 1
    patterns = [pack_pattern(causal(rows, 0), "float32") for rows in (300, 70)]
    data = np.ascontiguousarray(np.concatenate(patterns, axis=1)[:2, :, None])
    own, other = (f"data/00000000/a0/{array.shard_name(n, 0, 0)}" for n in (0, 1))
    stored = objects.get(own, max_bytes=1 << 24)
    for key in (own, other):
        parts = encode_shard(geometry, 0, data, Codec.FAST, key)
        assert (b"".join(map(bytes, parts)) == stored) == (key == own)
        objects.put(own, parts)
    with pytest.raises(DamagedObject, match="another shard's"):
        open_run(str(tmp_path)).pattern("p0", 0, 0, query=5)


@pytest.mark.parametrize("tile_bytes", [1 << 25, 4 * 300 * 2 * 7])
def test_head_scores_come_from_stored_patterns(sample, tile_bytes, monkeypatch) -> None:
    monkeypatch.setattr(reductions, "TILE_BYTES", tile_bytes)
    run, truth, error = sample
    diagonals = [np.diagonal(whole, -1, 2, 3) for whole in truth.values()]
    want = np.concatenate(diagonals, axis=2).astype(np.float64).mean(axis=2)
    got = run.head_scores("previous_token")
    assert got.attrs == {"queries": 299 + 69, "prompts": 2}
    np.testing.assert_allclose(got.values, want, atol=error + 1e-6)
    part = run.head_scores("previous_token", layers=[1], heads=[3, 0], prompts=["p0", "p2"])
    np.testing.assert_allclose(part.values, want[1:, [3, 0]], atol=error + 1e-6)
    table = run.head_scores("previous_token", per_prompt=True, layers=[0])
    assert table.num_rows == 2 * 4
    np.testing.assert_allclose(
        table["score"].to_numpy()[4:], diagonals[1][0].mean(axis=1), atol=error + 1e-6
    )
