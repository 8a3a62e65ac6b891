"""Any one flipped bit of a run raises on read or is found by verify."""

from __future__ import annotations

import numpy as np
import pytest

from store.codec import Codec
from store.objects.local import LocalStore
from store.objects.obstore_store import ObstoreStore
from store.snapshot import write_snapshot
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, write_run

FLIPS = 1000


@pytest.mark.parametrize("codec", list(Codec))
def test_random_flips_are_all_found(tmp_path, codec):
    objects = LocalStore(tmp_path)
    shape = SampleShape(
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        codec=codec,
        dtype="bfloat16",
        sites=("rot_k", "z"),
    )
    write_run(objects, shape, [[130, 0, 7], [3]])
    write_snapshot(objects, RUN_ID)
    memory = ObstoreStore(f"memory://flips-{codec}")
    names = [info.name for info in objects.list("")]
    for name in names:
        memory.put(name, [objects.get(name, max_bytes=1 << 30)])
    assert verify_run(memory, deep=True).ok
    rng = np.random.default_rng(3)
    for _ in range(FLIPS // 3 + 1):
        name = names[rng.integers(len(names))]
        whole = memory.get(name, max_bytes=1 << 30)
        place = int(rng.integers(len(whole) * 8))
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        memory.put(name, [damaged])
        report = verify_run(memory, deep=True, threads=1)
        assert not report.ok, f"{name}: bit {place} flipped unnoticed"
        memory.put(name, [whole])
    assert verify_run(memory, deep=True).ok
