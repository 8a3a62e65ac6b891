"""The chunk cache: bounded, least recently used goes first, right from many threads at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from store.array_reader import ReadOptions
from store.chunk_cache import ChunkCache
from store.objects.local import LocalStore
from store.run import open_run
from tests.store.sample_run import SampleShape, write_run


def chunk(value: int, size: int = 100) -> np.ndarray:
    return np.full(size, value, np.uint8)


def test_the_least_recently_used_goes_first() -> None:
    cache = ChunkCache(500)
    for i in range(5):
        cache.put(("a", i), chunk(i))
    assert cache.get(("a", 0)) is not None
    cache.put(("a", 5), chunk(5))
    assert cache.get(("a", 1)) is None
    assert cache.get(("a", 0)) is not None
    held = cache.statistics()
    assert (held.chunks, held.bytes) == (5, 500)
    assert (held.hits, held.misses) == (2, 1)


def test_a_large_chunk_never_empties_the_cache() -> None:
    cache = ChunkCache(500)
    cache.put(("a", 0), chunk(0))
    cache.put(("b", 0), chunk(1, 300))
    assert cache.get(("b", 0)) is None
    assert cache.get(("a", 0)) is not None
    nothing = ChunkCache(0)
    nothing.put(("a", 0), chunk(0))
    assert nothing.statistics().chunks == 0
    with pytest.raises(ValueError, match="never negative"):
        ChunkCache(-1)


def test_a_view_is_copied_and_nothing_here_can_be_written() -> None:
    cache = ChunkCache(4000)
    whole = np.arange(1000, dtype=np.uint8)
    cache.put(("a", 0), whole[10:20])
    whole[:] = 0
    kept = cache.get(("a", 0))
    assert kept is not None
    assert kept.tolist() == list(range(10, 20))
    assert kept.base is None
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1
    cache.put(("a", 0), chunk(7))
    assert cache.statistics().bytes == 100


def test_many_threads_read_right_values_within_the_bound(tmp_path) -> None:
    (unit, _) = write_run(LocalStore(tmp_path), SampleShape(), [[700], [9]])
    run = open_run(str(tmp_path), reading=ReadOptions(cache_bytes=300_000, threads=3))
    truth = unit.arrays["z"]
    failures: list[str] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            layer, head, pos = (int(rng.integers(0, n)) for n in (2, 4, 700))
            got = run.read("z", prompt="p0", layer=layer, head=head, pos=pos).values
            if got.tobytes() != truth[layer, pos, head].tobytes():
                failures.append(f"{layer}, {head}, {pos}")

    threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    statistics = run.cache_statistics()
    assert statistics.hits > 0
    assert statistics.bytes <= 300_000
