"""Decoded chunks that were read lately, bounded in bytes, shared by the threads of one open run.

Knows keys and arrays; never knows where they come from. Chunks of a commit never change, so nothing
is ever invalidated. Only chunks whose checksum was checked are put here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ChunkKey = tuple[str, int]
"""(object name with its attempt's folder, start of the chunk in it)."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a cache holds and how often it answered."""

    chunks: int
    bytes: int
    max_bytes: int
    hits: int
    misses: int


class ChunkCache:
    """Least recently used chunks within `max_bytes`; safe to use from many threads.

    A chunk larger than a quarter of the bound is not kept, so one read never empties the cache.
    `max_bytes` 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"a cache's size is never negative, got {max_bytes}")
        self._max_bytes = max_bytes
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._chunks: OrderedDict[ChunkKey, NDArray[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> NDArray[Any] | None:
        """Return the chunk, or None if it is not here. Do not write to it."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                self._misses += 1
                return None
            self._hits += 1
            self._chunks.move_to_end(key)
            return chunk

    def put(self, key: ChunkKey, chunk: NDArray[Any]) -> None:
        """Keep a chunk, dropping the least recently used ones to stay within the bound.

        A view is copied, so that it does not hold the whole range that it was read with.
        """
        if chunk.nbytes * 4 > self._max_bytes:
            return
        kept = np.array(chunk, copy=True) if chunk.base is not None else chunk
        kept.flags.writeable = False
        with self._lock:
            before = self._chunks.pop(key, None)
            self._bytes += kept.nbytes - (0 if before is None else before.nbytes)
            self._chunks[key] = kept
            while self._bytes > self._max_bytes:
                _, dropped = self._chunks.popitem(last=False)
                self._bytes -= dropped.nbytes

    def statistics(self) -> CacheStatistics:
        """Return what the cache holds and how often it answered."""
        with self._lock:
            return CacheStatistics(
                len(self._chunks), self._bytes, self._max_bytes, self._hits, self._misses
            )
