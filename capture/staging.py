"""Rows leave the forward pass: a device ring filled head-major, drained into host slabs.

On a GPU each tensor is copied once on the compute stream into the current *slot* of a preallocated
device ring, as [heads, rows, head size]; a full slot leaves as one contiguous copy on a side
stream into a preallocated pinned *slab*. Nothing synchronises and nothing is allocated in the
forward pass. On a CPU the slab itself is filled. What slabs mean is not known here: a filled slab
is handed to `on_slab` with its entries, and comes back by `Slab.release`.

Shape legend: T slab rows of the step, F features (heads * head size), H heads, R staged rows,
D head size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from capture.errors import CaptureStalled
from capture.rows import Run

ALIGNMENT = 256
NUM_DEVICE_SLOTS = 8

BITS_DTYPE = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of one step in a slab: [num_heads, num_rows, head_size] from `offset` bytes."""

    tap: int
    offset: int
    num_heads: int
    num_rows: int
    head_size: int
    item_bytes: int
    runs: tuple[Run, ...]

    def bits(self, slab: Slab) -> np.ndarray:
        """Return the entry's values in `slab` as unsigned integers of that width, not copied."""
        num_bytes = self.num_heads * self.num_rows * self.head_size * self.item_bytes
        flat = slab.bytes[self.offset : self.offset + num_bytes]
        shape = (self.num_heads, self.num_rows, self.head_size)
        return flat.view(BITS_DTYPE[self.item_bytes]).reshape(shape)


@dataclass(slots=True)
class Slab:
    """One preallocated piece of host memory and what lies in it."""

    tensor: torch.Tensor
    bytes: np.ndarray
    pool: SlabPool
    event: Any = None
    entries: list[Entry] = field(default_factory=list)
    holds: int = 0

    def wait(self) -> None:
        """Return once the copy into the slab is done; lets other threads run meanwhile."""
        if self.event is not None:
            self.event.synchronize()

    def release(self) -> None:
        """Give back one hold; the last one returns the slab to its pool."""
        self.pool.release(self)


class SlabPool:
    """A fixed number of slabs, allocated once. Threads return them, the engine thread takes."""

    def __init__(self, num_slabs: int, slab_bytes: int, pinned: bool) -> None:
        self.num_slabs, self.slab_bytes = num_slabs, slab_bytes
        self._changed = threading.Condition()
        self._free: list[Slab] = []
        for _ in range(num_slabs):
            tensor = torch.empty(slab_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._free.append(Slab(tensor, tensor.numpy(), self))

    @property
    def num_free(self) -> int:
        with self._changed:
            return len(self._free)

    def wait_free(self, num_slabs: int, seconds: float) -> float:
        """Wait until `num_slabs` are free; return the seconds waited. Raises `CaptureStalled`."""
        started = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._free) >= num_slabs, seconds):
                raise CaptureStalled(
                    f"{len(self._free)} of {self.num_slabs} host slabs are free after "
                    f"{seconds:.0f} s, {num_slabs} are needed for the next step: the store takes "
                    "the rows too slowly or not at all"
                )
        return time.monotonic() - started

    def take(self) -> Slab:
        with self._changed:
            if not self._free:
                raise CaptureStalled("no host slab is free inside a forward pass; please report it")
            slab = self._free.pop()
        slab.entries, slab.event, slab.holds = [], None, 1
        return slab

    def hold(self, slab: Slab, count: int) -> None:
        with self._changed:
            slab.holds += count

    def release(self, slab: Slab) -> None:
        with self._changed:
            slab.holds -= 1
            if slab.holds == 0:
                self._free.append(slab)
                self._changed.notify_all()


class Staging:
    """Where the step block puts tensors. Used by the engine's thread alone."""

    def __init__(
        self,
        *,
        slot_bytes: int,
        num_slabs: int,
        num_device_slots: int,
        device: torch.device,
        on_slab: Callable[[Slab], None],
    ) -> None:
        self.slot_bytes = slot_bytes
        self.on_slab = on_slab
        self.cuda = device.type == "cuda"
        self.pool = SlabPool(num_slabs, slot_bytes, pinned=self.cuda)
        self.staged_bytes = 0
        self._used = 0
        self._entries: list[Entry] = []
        self._slab: Slab | None = None
        self._slot = 0
        if self.cuda:
            self._ring = torch.empty(
                (num_device_slots, slot_bytes), dtype=torch.uint8, device=device
            )
            self._drained: list[Any] = [None] * num_device_slots
            self._stream = torch.cuda.Stream(device)

    @property
    def device_bytes(self) -> int:
        return self._ring.numel() if self.cuda else 0

    def slabs_needed(self, entry_bytes: Sequence[int]) -> int:
        """Return how many slabs must be free to stage tensors of these sizes one after another."""
        used, slabs = self._used, 0
        taken = self._slab is not None
        for num_bytes in entry_bytes:
            if used + num_bytes > self.slot_bytes and used:
                slabs, used, taken = slabs + (self.cuda or not taken), 0, False
            used = _aligned(used + num_bytes)
        return slabs + (self.cuda or not taken)

    def put(
        self,
        tap: int,
        x_TF: torch.Tensor,
        num_heads: int,
        head_size: int,
        index: torch.Tensor | None,
        num_rows: int,
        runs: tuple[Run, ...],
    ) -> None:
        """Stage rows of `x_TF` (all, or those that `index` picks) as [heads, rows, head size]."""
        item_bytes = x_TF.element_size()
        num_bytes = num_heads * num_rows * head_size * item_bytes
        if self._used and self._used + num_bytes > self.slot_bytes:
            self.flush()
        offset = self._used
        region = self._open_slot()[offset : offset + num_bytes]
        staged_HRD = region.view(x_TF.dtype).view(num_heads, num_rows, head_size)
        x_HTD = x_TF.view(x_TF.shape[0], num_heads, head_size).transpose(0, 1)
        if index is None:
            staged_HRD.copy_(x_HTD)
        else:
            torch.index_select(x_HTD, 1, index, out=staged_HRD)
        self._entries.append(Entry(tap, offset, num_heads, num_rows, head_size, item_bytes, runs))
        self._used = _aligned(offset + num_bytes)
        self.staged_bytes += num_bytes

    def flush(self) -> None:
        """Send what is staged to its slab and hand the slab on. Does not wait for the copy."""
        if not self._entries:
            return
        if self.cuda:
            slab = self.pool.take()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                slab.tensor[: self._used].copy_(
                    self._ring[self._slot, : self._used], non_blocking=True
                )
                slab.event = torch.cuda.Event()
                slab.event.record(self._stream)
            self._drained[self._slot] = slab.event
            self._slot = (self._slot + 1) % len(self._drained)
        else:
            assert self._slab is not None
            slab, self._slab = self._slab, None
        slab.entries, self._entries, self._used = self._entries, [], 0
        self.on_slab(slab)

    def _open_slot(self) -> torch.Tensor:
        if self.cuda:
            if self._used == 0 and (drained := self._drained[self._slot]) is not None:
                torch.cuda.current_stream().wait_event(drained)
                self._drained[self._slot] = None
            return self._ring[self._slot]
        if self._slab is None:
            self._slab = self.pool.take()
        return self._slab.tensor


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
