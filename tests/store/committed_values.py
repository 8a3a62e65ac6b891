"""Reads a committed unit whole with nothing but the commit: an independent check of the reader."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from store import keys
from store.codec import DTYPES
from store.commit import read_commit
from store.objects.protocol import ObjectStore
from store.shard import decode_chunk
from store.shard_index import chunk_offsets


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
            offsets = chunk_offsets(g, array.stored_sizes(g, token_shard, name)).tolist()
            for number, (start, end) in enumerate(pairwise(offsets)):
                group, chunk = divmod(number, g.token_chunks_in_shard(token_shard))
                stored = data[start:end]
                values = decode_chunk(g, stored, array.codec, dtype, prefix + name, number)
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
