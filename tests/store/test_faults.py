"""A capture that fails anywhere leaves nothing or everything, and a resume ends bit-exact."""

from __future__ import annotations

import secrets

import pytest

from store import keys
from store.codec import Codec
from store.commit import committed_units
from store.objects.local import LocalStore
from store.objects.obstore_store import ObstoreStore
from store.plan import read_segments
from store.snapshot import find_committed, write_snapshot
from store.verify import verify_run
from tests.store.committed_values import assert_same_values, committed_values
from tests.store.faults import FaultyStore, InjectedFault, When
from tests.store.sample_run import (
    RUN_ID,
    SampleShape,
    capture,
    sample_units,
    write_manifests,
    write_run,
)

SHAPE = SampleShape(num_heads=2, num_kv_heads=2, max_shard_bytes=32 << 10)
LENGTHS = [[300, 0, 7]]


def _writes_of_one_unit(tmp_path) -> int:
    counting = FaultyStore(LocalStore(tmp_path / "counted"))
    capture(counting, SHAPE, sample_units(SHAPE, LENGTHS)[0])
    return counting.writes


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("dead", [False, True], ids=["one fault", "dead after it"])
@pytest.mark.parametrize("when", list(When))
def test_every_write_of_a_unit_failed(tmp_path, when, dead, kind):
    (sample,) = sample_units(SHAPE, LENGTHS)
    writes = _writes_of_one_unit(tmp_path)
    assert writes > 20
    for number in range(writes):
        inner = (
            LocalStore(tmp_path / f"run-{number}")
            if kind == "local"
            else ObstoreStore(f"memory://{secrets.token_hex(8)}")
        )
        write_manifests(inner, SHAPE, LENGTHS)
        try:
            result = capture(FaultyStore(inner, number, when, dead), SHAPE, sample, "first")
            failed = False
        except InjectedFault:
            failed = True
        last = number == writes - 1
        # Only a commit whose answer was lost is survived without a resume: it is read back.
        assert failed != (last and when is When.AFTER and not dead)
        committed = committed_units(inner)
        assert committed == ({0: keys.commit_key(0)} if last and when is When.AFTER else {})
        if not failed:
            assert result.won
        for key in committed.values():
            assert_same_values(committed_values(inner, key), sample.arrays)
        assert verify_run(inner, deep=True).ok

        resumed = capture(inner, SHAPE, sample, "second")
        assert resumed.attempt == ("first" if committed else "second")
        assert_same_values(committed_values(inner, keys.commit_key(0)), sample.arrays)
        assert verify_run(inner, deep=True).ok


@pytest.mark.parametrize("when", list(When))
def test_every_write_of_the_manifests_failed(tmp_path, when):
    counting = FaultyStore(LocalStore(tmp_path / "counted"))
    write_manifests(counting, SHAPE, LENGTHS)
    for number in range(counting.writes):
        inner = LocalStore(tmp_path / f"run-{number}")
        with pytest.raises(InjectedFault):
            write_manifests(FaultyStore(inner, number, when), SHAPE, LENGTHS)
        whole = number == counting.writes - 1 and when is When.AFTER
        assert bool(read_segments(inner)) == whole


@pytest.mark.parametrize("when", list(When))
def test_every_write_of_a_snapshot_failed(tmp_path, when):
    objects = LocalStore(tmp_path / "run")
    write_run(objects, SHAPE, LENGTHS)
    first = write_snapshot(objects, RUN_ID).name
    for number in range(4):
        with pytest.raises(InjectedFault):
            write_snapshot(FaultyStore(objects, number, when), RUN_ID)
        found = find_committed(objects, RUN_ID)
        assert found.units().tolist() == [0]
        assert found.snapshot is not None
        assert (found.snapshot != first) == (number == 3 or (number == 2 and when is When.AFTER))
        first = found.snapshot
        assert verify_run(objects, deep=True).ok


@pytest.mark.parametrize("codec", [Codec.FAST, Codec.SMALL])
def test_compressed_units_are_exact_too(tmp_path, codec):
    shape = SampleShape(codec=codec, dtype="bfloat16")
    objects = LocalStore(tmp_path)
    for sample in write_run(objects, shape, [[300, 0, 7], [20, 300]]):
        assert_same_values(committed_values(objects, keys.commit_key(sample.unit)), sample.arrays)
