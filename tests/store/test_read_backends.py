"""The same reads over every back end: selections against plain numpy, and damage that must show."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store import keys
from store.array_reader import ReadOptions
from store.codec import Codec
from store.commit import begin_repair
from store.errors import DamagedObject
from store.objects.protocol import ByteRange
from store.run import Run
from store.snapshot import write_snapshot
from tests.store.sample_run import RUN_ID, SampleShape, capture, make_unit, write_run

LENGTHS = [[300, 7], [520]]


@pytest.fixture
def shape() -> SampleShape:
    return SampleShape(dtype="bfloat16", codec=Codec.FAST, ranks=2)


def test_every_back_end_reads_the_same_rows(objects, shape) -> None:
    units = write_run(objects, shape, LENGTHS)
    whole = {
        "p0": units[0].arrays["z"][:, :300],
        "p1": units[0].arrays["z"][:, 300:],
        "p2": units[1].arrays["z"],
    }
    run = Run(objects, ReadOptions(cache_bytes=0))

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(sorted(whole)))
        truth = whole[prompt].swapaxes(1, 2)
        layers, heads, places = (
            data.draw(st.lists(st.integers(0, size - 1), max_size=4)) for size in truth.shape[:3]
        )
        got = run.read("z", prompt=prompt, layer=layers, head=heads, pos=places)
        want = truth[np.ix_(layers, heads, places)]
        assert got.values.tobytes() == np.ascontiguousarray(want).tobytes()

    check()
    batches = list(run.batches(["z"], size=200, shuffle=1))
    assert sum(len(batch) for batch in batches) == 827
    assert repr(run).count("3 of 3 stored") == 1


def test_damage_shows_on_every_back_end(objects, shape) -> None:
    write_run(objects, shape, LENGTHS)
    name = f"{keys.attempt_prefix(0, 'a0')}z/c/1/0/0/0"
    data = bytearray(objects.get_ranges(name, [ByteRange(0, objects.size(name))])[0])
    data[11] ^= 1
    objects.put(name, [bytes(data)])
    run = Run(objects, ReadOptions())
    with pytest.raises(DamagedObject, match="crc32c"):
        run.read("z", prompt="p0", layer=1)
    objects.put(name, [bytes(data[:40])])
    with pytest.raises(DamagedObject):
        run.read("z", prompt="p0", layer=1)
    objects.delete(name)
    with pytest.raises(DamagedObject, match="it is not there"):
        run.read("z", prompt="p0", layer=1)


def test_every_back_end_opens_with_a_snapshot_and_what_came_after_it(objects, shape) -> None:
    units = write_run(objects, shape, LENGTHS)
    write_snapshot(objects, RUN_ID)
    repaired = make_unit(shape, 1, 2, [520], seed=8)
    capture(objects, shape, repaired, "a1", repair=begin_repair(objects, 1))
    run = Run(objects, ReadOptions())
    assert run.read("z", prompt=0).values.tobytes() == as_read(units[0].arrays["z"][:, :300])
    assert run.read("z", prompt="p2").values.tobytes() == as_read(repaired.arrays["z"])
    assert run.prompts["status"].to_pylist() == ["stored"] * 3


def as_read(values_LTHD) -> bytes:
    return np.ascontiguousarray(values_LTHD.swapaxes(1, 2)).tobytes()
