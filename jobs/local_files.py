"""What the files of a local checkpoint hold, by samples: cheap for hundreds of gigabytes.

Small files count whole. Of a larger one its size counts, its first and last block, and one block in
every stretch of it, at least `MIN_BLOCKS`: whatever was written anew is found if it covers a whole
stretch of a file, as a weight matrix of a model does that is large enough to be sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WHOLE_BYTES = 16 << 20
"""Files of up to so many bytes are read whole."""

BLOCK_BYTES = 4 << 10
STRETCH_BYTES = 16 << 20
MIN_BLOCKS = 64

_READERS = 8


def files_of(place: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of a folder's files in order, hidden ones left out; or of a file."""
    if place.is_file():
        yield place.name, place
        return
    for file in sorted(path for path in place.rglob("*") if path.is_file()):
        name = file.relative_to(place).as_posix()
        if not name.startswith("."):
            yield name, file


def sampled_content(places: list[Path]) -> str:
    """Return a SHA-256 of what samples of all files of these folders and files hold."""
    found = [pair for place in places for pair in files_of(place)]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-files") as readers:
        sampled = readers.map(sample, [file for _, file in found])
        for (name, _), one in zip(found, sampled, strict=True):
            digest.update(f"{name}\0".encode())
            digest.update(one)
    return digest.hexdigest()


def sample(file: Path) -> bytes:
    """Return a SHA-256 of a file's size and of its sampled blocks, or of all of it."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        size = file.stat().st_size
        digest.update(f"{size}\0".encode())
        for start, length in blocks(size):
            opened.seek(start)
            left = length
            while left and (data := opened.read(min(left, 1 << 20))):
                digest.update(data)
                left -= len(data)
    return digest.digest()


def blocks(size: int) -> list[tuple[int, int]]:
    """Return (start, length) of what is read of a file of `size` bytes, in order."""
    if size <= WHOLE_BYTES:
        return [(0, size)]
    count = max(MIN_BLOCKS, -(-size // STRETCH_BYTES))
    last = size - BLOCK_BYTES
    return [(last * number // count, BLOCK_BYTES) for number in range(count + 1)]
