"""Rows leave the forward pass: a device ring filled in the shards' own order, drained into slabs.

On a GPU each tensor is copied once on the compute stream into the current *slot* of a
preallocated device ring, already in the order of a shard's chunks: [head groups, tiles of tokens,
heads of the group, tokens, head size]. A full slot leaves as one contiguous copy on a side stream
into a preallocated page-locked *slab*, from which whole chunks are written as they lie. Nothing
synchronises and nothing is allocated in the forward pass. On a CPU the slab itself is filled. What
slabs mean is not known here: a filled slab is handed to `on_slab` with its entries, and comes back
by `Slab.release`.

The copy moves the widest elements that the strides allow: 16 bytes at a time it runs at the speed
of a contiguous copy (3.9 TB/s on an H200, counting bytes read and written), as bfloat16 at 1.6.

Shape legend: T slab rows of the step, F features (heads * head size), H heads, R staged rows,
D head size; G head groups, g heads of a group, C tiles, t tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from capture.errors import RowsMissing
from capture.heads import HeadSlice
from capture.rows import Run
from capture.slabs import Entry, Slab, SlabMemory, SlabPool, TapShape

ALIGNMENT = 256
NUM_DEVICE_SLOTS = 8

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_WIDE_DTYPES = (torch.complex128, torch.int64, torch.int32, torch.int16)


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
        memory = SlabMemory.allocate(num_slabs, slot_bytes)
        self.pool = SlabPool(memory)
        self._host = torch.from_numpy(memory.bytes).view(num_slabs, slot_bytes)
        self.staged_bytes = 0
        self._used = 0
        self._entries: list[Entry] = []
        self._slab: Slab | None = None
        self._slot = 0
        if self.cuda:
            _pin(self._host)
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
        shape: TapShape,
        index: torch.Tensor | None,
        num_rows: int,
        runs: tuple[Run, ...],
        heads: tuple[HeadSlice, ...] | None = None,
    ) -> None:
        """Stage rows of `x_TF` (all, or those that `index` picks, in its order) tile by tile.

        `heads` says which of its heads are staged, and where; None: all of them, in order. Raises
        `RowsMissing` for fewer rows than `num_rows`: a copy would spread them over the others.
        """
        if index is None and len(x_TF) < num_rows:
            raise RowsMissing(
                f"tap {tap} has {len(x_TF)} rows of {num_rows} that the step computes; a layer "
                "that leaves out rows of a step cannot be captured"
            )
        num_bytes = shape.staged_bytes(num_rows)
        if self._used and self._used + num_bytes > self.slot_bytes:
            self.flush()
        offset = self._used
        region = self._open_slot()[offset : offset + num_bytes]
        if index is not None:
            x_TF = _rows_of(x_TF, index)
        elif x_TF.stride(1) != 1:
            # A view whose features lie apart or on each other (an expanded tensor of a probe).
            x_TF = x_TF.contiguous()
        wide_TF = _widened(x_TF, shape)
        head_items = shape.head_size * x_TF.element_size() // wide_TF.element_size()
        tile = shape.tile_tokens(num_rows)
        groups = shape.num_heads // shape.group_heads
        staged_GCgtD = region.view(wide_TF.dtype).view(
            groups, -1, shape.group_heads, tile, head_items
        )
        whole = num_rows // tile * tile
        for piece in heads or (HeadSlice(0, 0, shape.num_heads),):
            x_TF = wide_TF[:, piece.local * head_items : (piece.local + piece.count) * head_items]
            first, within = divmod(piece.staged, shape.group_heads)
            together = min(piece.count, shape.group_heads)
            target_GCgtD = staged_GCgtD[
                first : first + piece.count // together, :, within : within + together
            ]
            x_CtGgD = x_TF[:whole].unflatten(0, (-1, tile)).unflatten(2, (-1, together, head_items))
            _copy(target_GCgtD[:, : whole // tile], x_CtGgD.permute(2, 0, 3, 1, 4))
            if whole < num_rows:
                x_tGgD = x_TF[whole:].unflatten(1, (-1, together, head_items))
                _copy(target_GCgtD[:, -1, :, : num_rows - whole], x_tGgD.permute(1, 2, 0, 3))
        self._entries.append(Entry(tap, offset, shape, num_rows, runs))
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
                self._host[slab.number, : self._used].copy_(
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
        return self._host[self._slab.number]


def _widened(x_TF: torch.Tensor, shape: TapShape) -> torch.Tensor:
    """Return the same memory as the widest elements that fit a head's row and its place."""
    item = x_TF.element_size()
    steps = (
        shape.head_size * item,
        x_TF.stride(0) * item,
        x_TF.data_ptr(),
        x_TF.storage_offset() * item,
    )
    for dtype in _WIDE_DTYPES:
        if dtype.itemsize > item and all(step % dtype.itemsize == 0 for step in steps):
            return x_TF.view(dtype)
    return x_TF.view(_BITS[item])


def _rows_of(x_TF: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows that `index` picks, in its order."""
    if x_TF.is_cuda:
        return torch.index_select(x_TF, 0, index)
    bits = x_TF.view(_BITS[x_TF.element_size()]).numpy()
    return torch.from_numpy(np.ascontiguousarray(bits[index.numpy()]))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between views of one shape; on a CPU in the calling thread alone.

    torch would share out each copy over all cores and wait for them: 7 ms of processor time for one
    tensor of 2,048 tokens where other work keeps the cores busy, against 0.2 to 2 in one thread.
    """
    if target.is_cuda:
        target.copy_(source)
    else:
        np.copyto(target.numpy(), source.numpy())


def _pin(host: torch.Tensor) -> None:
    """Page-lock memory that torch did not allocate, so that copies into it run on their own."""
    code = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0)
    if int(code) != 0 or not host.is_pinned():
        raise RuntimeError(f"CUDA could not page-lock {host.numel()} bytes of host memory ({code})")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
