"""Reads a committed unit whole with nothing but the commit: an independent check of the reader."""

from __future__ import annotations

import numpy as np

from store import keys
from store.codec import DTYPES, Codec
from store.commit import read_commit
from store.objects.protocol import ObjectStore
from store.shard import decode_chunk, raw_chunk_sizes, unpack_chunk_sizes


def committed_values(objects: ObjectStore, key: str) -> dict[str, np.ndarray]:
    """Return site -> [L, T, H, D] of the commit of this name, every checksum checked."""
    commit = read_commit(objects, key)
    prefix = keys.attempt_prefix(commit.unit, commit.attempt)
    sizes = {record.name: record.bytes for record in commit.objects}
    found = {}
    for array in commit.arrays:
        g = array.geometry()
        dtype = DTYPES[array.dtype]
        out = np.zeros((g.num_layers, g.num_tokens, g.num_heads, g.head_size), dtype)
        for layer, token_shard, head_shard in g.shard_places():
            name = array.shard_name(layer, token_shard, head_shard)
            data = objects.get(prefix + name, max_bytes=sizes[name])
            assert len(data) == sizes[name]
            if array.codec is Codec.RAW:
                chunk_sizes = raw_chunk_sizes(g, token_shard)
            else:
                chunk_sizes = unpack_chunk_sizes(array.chunk_sizes[name], g, token_shard, name)
            offset = 0
            for place, size in enumerate(chunk_sizes.tolist()):
                group, chunk = divmod(place, g.token_chunks_in_shard(token_shard))
                values = decode_chunk(g, data[offset : offset + size], array.codec, dtype, name)
                offset += size
                head = head_shard * g.shard_heads + group * g.group_heads
                first = token_shard * g.shard_tokens + chunk * g.chunk_tokens
                rows = out[layer, first : first + g.chunk_tokens, head : head + g.group_heads]
                rows[:] = values.swapaxes(0, 1)[: rows.shape[0]]
        found[array.site] = out
    return found


def assert_same_values(found: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> None:
    assert set(found) == set(truth)
    for site, values in truth.items():
        assert found[site].tobytes() == values.tobytes(), site
