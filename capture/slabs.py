"""Host slabs: a fixed amount of memory, allocated once, that staged rows pass through.

Slabs lie in one anonymous memory file, so that writer processes can map them too. A slab is taken
by the engine's thread, filled, and free again when its last hold is released. Knows no torch: the
side that fills slabs is `staging`.

Shape legend: G head groups, C tiles of tokens, g heads of a group, t tokens of a tile, D head size.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from capture.errors import CaptureStalled
from capture.rows import Run

BITS_DTYPE = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class TapShape:
    """How a tap's rows are staged: heads in groups, tokens in tiles of at most `chunk_tokens`."""

    num_heads: int
    head_size: int
    item_bytes: int
    group_heads: int
    chunk_tokens: int

    @property
    def row_bytes(self) -> int:
        return self.num_heads * self.head_size * self.item_bytes

    def tile_tokens(self, num_rows: int) -> int:
        """Return the tokens of a tile when `num_rows` rows are staged."""
        return min(self.chunk_tokens, num_rows)

    def staged_bytes(self, num_rows: int) -> int:
        """Return the bytes that `num_rows` rows take when staged, the last tile filled up."""
        if not num_rows:
            return 0
        tile = self.tile_tokens(num_rows)
        return -(-num_rows // tile) * tile * self.row_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of one step in a slab, from `offset` bytes."""

    tap: int
    offset: int
    shape: TapShape
    num_rows: int
    runs: tuple[Run, ...]

    def bits(self, slab: np.ndarray) -> np.ndarray:
        """Return the values as unsigned integers of their width, [G, C, g, t, D], not copied.

        `slab` is uint8 [slab bytes]. Staged row r is token r % t of tile r // t; what follows the
        last row means nothing.
        """
        shape, tile = self.shape, self.shape.tile_tokens(self.num_rows)
        flat = slab[self.offset : self.offset + shape.staged_bytes(self.num_rows)]
        return flat.view(BITS_DTYPE[shape.item_bytes]).reshape(
            shape.num_heads // shape.group_heads, -1, shape.group_heads, tile, shape.head_size
        )


def copy_rows(
    target_GCgtD: np.ndarray,
    row: int,
    source_GCgtD: np.ndarray,
    start: int,
    count: int,
) -> None:
    """Copy `count` rows between arrays of tiles whose token counts and phases may differ."""
    target_tile, source_tile = target_GCgtD.shape[3], source_GCgtD.shape[3]
    while count:
        to, at = divmod(row, target_tile)
        from_, off = divmod(start, source_tile)
        size = min(count, target_tile - at, source_tile - off)
        target_GCgtD[:, to, :, at : at + size] = source_GCgtD[:, from_, :, off : off + size]
        row, start, count = row + size, start + size, count - size


class SlabMemory:
    """The memory of all slabs, one after the other in one anonymous memory file."""

    def __init__(
        self, descriptor: int, num_slabs: int, slab_bytes: int, *, mapped_at_once: bool = False
    ) -> None:
        """Map the memory file; `mapped_at_once` where its pages exist and will all be read.

        Otherwise a writer process meets each page of 4 KiB by a fault of its own, in the middle of
        a checksum.
        """
        self.descriptor, self.num_slabs, self.slab_bytes = descriptor, num_slabs, slab_bytes
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if mapped_at_once else 0)
        self._map = mmap.mmap(descriptor, num_slabs * slab_bytes, flags)
        self.bytes = np.frombuffer(self._map, np.uint8)
        """uint8 [num_slabs * slab_bytes]"""

    @classmethod
    def allocate(cls, num_slabs: int, slab_bytes: int) -> SlabMemory:
        """Make the memory; the system backs it with pages as they are first written."""
        descriptor = os.memfd_create("attnstore-slabs")
        os.ftruncate(descriptor, num_slabs * slab_bytes)
        return cls(descriptor, num_slabs, slab_bytes)

    def slab(self, number: int) -> np.ndarray:
        """Return one slab's bytes, uint8 [slab_bytes]."""
        return self.bytes[number * self.slab_bytes : (number + 1) * self.slab_bytes]


@dataclass(slots=True)
class Slab:
    """One slab that has been taken, and what lies in it."""

    number: int
    pool: SlabPool
    event: Any = None
    entries: list[Entry] = field(default_factory=list)
    holds: int = 1

    @property
    def bytes(self) -> np.ndarray:
        """The slab's memory, uint8 [slab bytes]."""
        return self.pool.memory.slab(self.number)

    def wait(self) -> None:
        """Return once the copy into the slab is done; lets other threads run meanwhile."""
        if self.event is not None:
            self.event.synchronize()

    def release(self) -> None:
        """Give back one hold; the last one returns the slab to its pool."""
        self.pool.release(self)


class SlabPool:
    """Which slabs are free. Any thread returns them; the engine's thread takes them."""

    def __init__(self, memory: SlabMemory) -> None:
        self.memory, self.num_slabs = memory, memory.num_slabs
        self._changed = threading.Condition()
        self._free = list(range(memory.num_slabs))
        self._taken: dict[int, Slab] = {}
        self._given_up: str | None = None

    @property
    def num_free(self) -> int:
        with self._changed:
            return len(self._free)

    def wait_free(self, num_slabs: int, seconds: float) -> float:
        """Wait until `num_slabs` are free; return the seconds waited. Raises `CaptureStalled`."""
        started = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._free) >= num_slabs or self._given_up is not None, seconds
            )
            if self._given_up is not None:
                raise CaptureStalled(f"host slabs will not become free: {self._given_up}")
            if len(self._free) < num_slabs:
                raise CaptureStalled(
                    f"{len(self._free)} of {self.num_slabs} host slabs are free after "
                    f"{seconds:.0f} s, {num_slabs} are needed for the next step: the store takes "
                    "the rows too slowly or not at all"
                )
        return time.monotonic() - started

    def take(self) -> Slab:
        """Return a free slab with one hold on it."""
        with self._changed:
            if not self._free:
                raise CaptureStalled("no host slab is free inside a forward pass; please report it")
            slab = Slab(self._free.pop(), self)
            self._taken[slab.number] = slab
        return slab

    def hold(self, slab: Slab, count: int) -> None:
        """Add holds to a taken slab."""
        with self._changed:
            slab.holds += count

    def release(self, slab: Slab) -> None:
        """Give back one hold; the last one frees the slab."""
        with self._changed:
            slab.holds -= 1
            if slab.holds == 0:
                del self._taken[slab.number]
                self._free.append(slab.number)
                self._changed.notify_all()

    def release_number(self, number: int) -> None:
        """Give back one hold of a taken slab, by its number."""
        with self._changed:
            slab = self._taken[number]
        self.release(slab)

    def give_up(self, reason: str) -> None:
        """Let every waiter fail now: no slab will come back."""
        with self._changed:
            self._given_up = self._given_up or reason
            self._changed.notify_all()
