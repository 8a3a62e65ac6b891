"""Staged bytes are the tensor's own, head-major, and slabs never run out unnoticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from capture.errors import CaptureStalled, RowsMissing
from capture.heads import head_share, head_slices
from capture.rows import Run
from capture.slabs import Slab, SlabMemory, SlabPool, TapShape
from capture.staging import Staging

SHAPE = TapShape(num_heads=2, head_size=4, item_bytes=4, group_heads=2, chunk_tokens=8)


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


def rows_of(slab: Slab, number: int = 0) -> np.ndarray:
    """Return an entry's bits as [R, H, D], put together from its groups and tiles."""
    entry = slab.entries[number]
    bits_GCgtD = entry.bits(slab.bytes)
    heads, size = entry.shape.num_heads, entry.shape.head_size
    bits_RHD = bits_GCgtD.transpose(1, 3, 0, 2, 4).reshape(-1, heads, size)
    return bits_RHD[: entry.num_rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [None, [3, 1, 0], list(range(12, -1, -1))])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (4, 2), (6, 3), (3, 3)])
@pytest.mark.parametrize("size", [3, 4, 16])
@pytest.mark.parametrize("offset", [0, 1])
def test_bits_are_kept_in_chunk_order(dtype, index, heads, group, size, offset) -> None:
    staging, slabs = make(slot_bytes=16 << 10)
    shape = TapShape(heads, size, dtype.itemsize, group, chunk_tokens=4)
    features = heads * size
    x_TF = torch.randn(13, features + offset).to(dtype)[:, offset:]
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    picked = list(range(13)) if index is None else index
    want = x_TF[picked].view(bits).numpy().reshape(len(picked), heads, size).copy()
    rows = None if index is None else torch.tensor(index)
    staging.put(0, x_TF, shape, rows, len(picked), (Run(0, 0, len(picked), 0),))
    x_TF.zero_()
    staging.flush()
    bits_GCgtD = slabs[0].entries[0].bits(slabs[0].bytes)
    assert bits_GCgtD.shape[0] == heads // group
    assert bits_GCgtD.shape[2:] == (group, min(4, len(picked)), size)
    assert np.array_equal(rows_of(slabs[0]).view(want.dtype), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [None, [3, 1, 0]])
@pytest.mark.parametrize(
    ("held", "group"),
    [((5,), 1), ((0, 1, 2, 3), 2), ((2, 3, 6, 7), 2), ((0, 1, 2, 3, 6, 7), 3), ((1, 4, 6), 3)],
)
def test_only_held_heads_are_staged(dtype, index, held, group) -> None:
    staging, slabs = make(slot_bytes=16 << 10)
    share = head_share(16, 8, 1, 2, [8 + head for head in held])
    size, count = 4, 13 if index is None else len(index)
    x_TF = torch.randn(13, 8 * size).to(dtype)
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    picked = list(range(13)) if index is None else index
    want = x_TF[picked].view(bits).numpy().reshape(count, 8, size)[:, held].copy()
    shape = TapShape(len(held), size, dtype.itemsize, group, chunk_tokens=4)
    rows = None if index is None else torch.tensor(index)
    staging.put(0, x_TF, shape, rows, count, (), head_slices(share, group))
    assert staging.staged_bytes == shape.staged_bytes(count)
    staging.flush()
    assert np.array_equal(rows_of(slabs[0]).view(want.dtype), want)


@pytest.mark.parametrize("rows", [1, 8, 12])
def test_a_tensor_of_fewer_rows_than_the_step_is_never_spread_over_them(rows) -> None:
    staging, _ = make()
    with pytest.raises(RowsMissing, match=f"{rows} rows of 16"):
        staging.put(0, torch.randn(rows, 8), SHAPE, None, 16, ())


def test_tensors_share_a_slab_until_it_is_full() -> None:
    staging, slabs = make(slot_bytes=1024)
    for tap in range(5):
        staging.put(tap, torch.full((8, 8), float(tap)), SHAPE, None, 8, ())
    staging.flush()
    assert [len(slab.entries) for slab in slabs] == [4, 1]
    for slab in slabs:
        for number, entry in enumerate(slab.entries):
            assert np.all(rows_of(slab, number).view(np.float32) == entry.tap)


def test_slabs_needed_is_what_is_taken() -> None:
    staging, _slabs = make(slot_bytes=1024, num_slabs=8)
    rows = [8, 16, 16, 24, 8]
    needed = staging.slabs_needed([SHAPE.staged_bytes(count) for count in rows])
    before = staging.pool.num_free
    for tap, count in enumerate(rows):
        staging.put(tap, torch.zeros(count, 8), SHAPE, None, count, ())
    assert before - staging.pool.num_free == needed == 3


def test_waiting_for_slabs_ends_with_what_is_wrong() -> None:
    pool = SlabPool(SlabMemory.allocate(2, 4096))
    held = [pool.take(), pool.take()]
    with pytest.raises(CaptureStalled, match="0 of 2 host slabs"):
        pool.wait_free(1, 0.01)
    held[0].release()
    assert pool.wait_free(1, 0.01) < 1.0


def test_a_slab_is_free_after_its_last_hold() -> None:
    pool = SlabPool(SlabMemory.allocate(1, 4096))
    slab = pool.take()
    pool.hold(slab, 2)
    slab.release()
    slab.release()
    assert pool.num_free == 0
    slab.release()
    assert pool.num_free == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [None, [3, 1, 0]])
@pytest.mark.parametrize(
    "kind", ["one value a row", "one row", "one value", "every other", "turned"]
)
def test_memory_that_is_no_row_of_its_own_is_staged_as_its_values(dtype, index, kind) -> None:
    heads, size, rows = 4, 16, 13
    features = heads * size
    x_TF = {
        "one value a row": torch.randn(rows, 1).to(dtype).expand(rows, features),
        "one row": torch.randn(1, features).to(dtype).expand(rows, features),
        "one value": torch.randn(1, 1).to(dtype).expand(rows, features),
        "every other": torch.randn(rows, 2 * features).to(dtype)[:, ::2],
        "turned": torch.randn(features, rows).to(dtype).T,
    }[kind]
    staging, slabs = make(slot_bytes=16 << 10)
    picked = list(range(rows)) if index is None else index
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    want = x_TF.clone(memory_format=torch.contiguous_format)[picked].view(bits).numpy()
    shape = TapShape(heads, size, dtype.itemsize, 2, chunk_tokens=4)
    at = None if index is None else torch.tensor(index)
    staging.put(0, x_TF, shape, at, len(picked), (Run(0, 0, len(picked), 0),))
    staging.flush()
    got = rows_of(slabs[0]).view(want.dtype)
    assert np.array_equal(got, want.reshape(len(picked), heads, size))
