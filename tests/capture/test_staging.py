"""Staged bytes are the tensor's own, head-major, and slabs never run out unnoticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from capture.errors import CaptureStalled
from capture.rows import Run
from capture.staging import Slab, SlabPool, Staging


def make(slot_bytes: int = 4096, num_slabs: int = 3) -> tuple[Staging, list[Slab]]:
    slabs: list[Slab] = []
    staging = Staging(
        slot_bytes=slot_bytes,
        num_slabs=num_slabs,
        num_device_slots=2,
        device=torch.device("cpu"),
        on_slab=slabs.append,
    )
    return staging, slabs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [None, [3, 1, 0]])
def test_bits_are_kept_head_major(dtype: torch.dtype, index: list[int] | None) -> None:
    staging, slabs = make()
    x_TF = torch.randn(5, 3 * 4).to(dtype)
    picked = list(range(5)) if index is None else index
    rows = None if index is None else torch.tensor(index)
    staging.put(0, x_TF, 3, 4, rows, len(picked), (Run(0, 0, len(picked), 0),))
    x_TF.zero_()
    staging.flush()
    bits_HRD = slabs[0].entries[0].bits(slabs[0])
    assert bits_HRD.shape == (3, len(picked), 4)
    again = torch.from_numpy(bits_HRD.view(np.uint8).copy()).view(dtype)
    assert again.shape == (3, len(picked), 4)
    assert bits_HRD.dtype.itemsize == dtype.itemsize


def test_head_order_and_rows_are_right() -> None:
    staging, slabs = make()
    x_TF = torch.arange(4 * 6, dtype=torch.float32).view(4, 6)
    staging.put(0, x_TF, 2, 3, torch.tensor([2, 0]), 2, (Run(0, 0, 2, 0),))
    staging.flush()
    values = slabs[0].entries[0].bits(slabs[0]).view(np.float32)
    assert values.tolist() == [[[12, 13, 14], [0, 1, 2]], [[15, 16, 17], [3, 4, 5]]]


def test_tensors_share_a_slab_until_it_is_full() -> None:
    staging, slabs = make(slot_bytes=1024)
    for tap in range(5):
        staging.put(tap, torch.full((8, 8), float(tap)), 2, 4, None, 8, ())
    staging.flush()
    assert [len(slab.entries) for slab in slabs] == [4, 1]
    for slab in slabs:
        for entry in slab.entries:
            assert np.all(entry.bits(slab).view(np.float32) == entry.tap)


def test_slabs_needed_is_what_is_taken() -> None:
    staging, _slabs = make(slot_bytes=1024, num_slabs=8)
    sizes = [256, 512, 512, 768, 256]
    needed = staging.slabs_needed(sizes)
    before = staging.pool.num_free
    for tap, size in enumerate(sizes):
        staging.put(tap, torch.zeros(size // 16, 4), 1, 4, None, size // 16, ())
    assert before - staging.pool.num_free == needed == 3


def test_waiting_for_slabs_ends_with_what_is_wrong() -> None:
    pool = SlabPool(2, 64, pinned=False)
    held = [pool.take(), pool.take()]
    with pytest.raises(CaptureStalled, match="0 of 2 host slabs"):
        pool.wait_free(1, 0.01)
    held[0].release()
    assert pool.wait_free(1, 0.01) < 1.0


def test_a_slab_is_free_after_its_last_hold() -> None:
    pool = SlabPool(1, 64, pinned=False)
    slab = pool.take()
    pool.hold(slab, 2)
    slab.release()
    slab.release()
    assert pool.num_free == 0
    slab.release()
    assert pool.num_free == 1
