"""Proof that no prompt id is used twice, in bounded memory at any number of prompts.

Each id is kept as a 128-bit digest in one of 256 bucket files; a bucket is sorted on its own at the
end. Up to `IN_MEMORY` ids nothing touches the disk. At 10^8 prompts: 2.4 GB of temporary files and
10 MB of memory at a time, where a set of strings would take about 10 GB.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np

IN_MEMORY = 1 << 20
_BUCKETS = 256
_RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("place", "<i8")])


class PromptIds:
    """Collects ids and tells which places repeat an earlier one. Use as a context manager."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._in_memory = in_memory
        self._pending: list[list[bytes]] = [[] for _ in range(_BUCKETS)]
        self._num_pending = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> PromptIds:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, prompt_id: str, place: int) -> None:
        """Note that the prompt at `place` has this id."""
        digest = hashlib.blake2b(prompt_id.encode(), digest_size=16).digest()
        self._pending[digest[0]].append(digest + place.to_bytes(8, "little"))
        self._num_pending += 1
        if self._num_pending >= self._in_memory:
            self._spill()

    def repeated(self, most: int = 10) -> list[tuple[int, int]]:
        """Return up to `most` pairs (first place, repeating place), the earliest repeats first."""
        pairs: list[tuple[int, int]] = []
        for bucket in range(_BUCKETS):
            records = self._records(bucket)
            records = records[np.lexsort((records["place"], records["low"], records["high"]))]
            high, low, places = records["high"], records["low"], records["place"]
            same = np.flatnonzero((high[1:] == high[:-1]) & (low[1:] == low[:-1]))
            pairs += [(int(places[i]), int(places[i + 1])) for i in same]
        return sorted(pairs, key=lambda pair: pair[1])[:most]

    def _records(self, bucket: int) -> np.ndarray:
        data = b"".join(self._pending[bucket])
        if self._folder is not None:
            file = self._file(bucket)
            data = (file.read_bytes() if file.exists() else b"") + data
        return np.frombuffer(data, dtype=_RECORD)

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="attnstore-ids-")
        for bucket, records in enumerate(self._pending):
            if records:
                with self._file(bucket).open("ab") as stream:
                    stream.write(b"".join(records))
                records.clear()
        self._num_pending = 0

    def _file(self, bucket: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"{bucket:02x}"
