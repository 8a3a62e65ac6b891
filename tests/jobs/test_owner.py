"""Ownership: one driver at a time is told so, and a dead one is succeeded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import owner as owner_module
from jobs.errors import RunOwnedElsewhere
from jobs.owner import OwnerRecord, RunOwner
from store.objects.open import open_store
from store.objects.protocol import ObjectStore


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "run"))


@pytest.fixture(autouse=True)
def no_owner_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Release every owner: one that beats on writes into whatever a later test watches."""
    claimed: list[RunOwner] = []
    start = RunOwner.__init__

    def remembered(owner: RunOwner, objects: ObjectStore, record: OwnerRecord) -> None:
        claimed.append(owner)
        start(owner, objects, record)

    monkeypatch.setattr(RunOwner, "__init__", remembered)
    yield
    for owner in claimed:
        owner.release()
    assert not any(owner._thread.is_alive() for owner in claimed)


def put_owner(objects: ObjectStore, **fields: object) -> OwnerRecord:
    values = {"epoch": 1, "host": "elsewhere", "pid": 1, "process": "1", **fields}
    record = OwnerRecord.model_validate(values)
    objects.put(f"owners/{record.epoch:08d}.json", [record.to_bytes()])
    return record


def test_a_living_owner_on_this_host_keeps_a_second_driver_out(objects: ObjectStore) -> None:
    first = RunOwner.claim(objects)
    with pytest.raises(RunOwnedElsewhere, match=f"process {os.getpid()}"):
        RunOwner.claim(objects)
    first.release()
    assert RunOwner.claim(objects).epoch == 2


def test_an_owner_whose_process_is_gone_is_succeeded_at_once(objects: ObjectStore) -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    put_owner(objects, host=owner_module._host(), pid=int(child.stdout), process="12345")
    started = time.monotonic()
    assert RunOwner.claim(objects, patience=30).epoch == 2
    assert time.monotonic() - started < 5


def test_a_silent_owner_elsewhere_is_succeeded_after_a_watch(objects: ObjectStore) -> None:
    put_owner(objects)
    told: list[str] = []
    assert RunOwner.claim(objects, patience=0.5, tell=told.append).epoch == 2
    assert "elsewhere" in told[0]


def test_an_owner_elsewhere_that_beats_is_left_alone(objects: ObjectStore) -> None:
    put_owner(objects)
    timer = threading.Timer(0.3, put_owner, [objects], {"beat": 1})
    timer.start()
    with pytest.raises(RunOwnedElsewhere, match="elsewhere"):
        RunOwner.claim(objects, patience=5)
    timer.join()


def test_taking_over_is_seen_by_the_older_owner_at_its_next_beat(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_module, "BEAT_SECONDS", 0.05)
    first = RunOwner.claim(objects)
    second = RunOwner.claim(objects, take_over=True)
    deadline = time.monotonic() + 10
    while first.newer is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert first.newer is not None
    assert first.newer.epoch == second.epoch
    assert second.newer is None


def test_an_owner_beats_by_itself_and_stops_when_released(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_module, "BEAT_SECONDS", 0.05)
    owner = RunOwner.claim(objects)
    time.sleep(0.5)
    owner.release()
    left = owner_module._latest(objects)
    assert left is not None
    assert left.released
    assert left.beat >= 2
    time.sleep(0.3)
    assert owner_module._latest(objects) == left


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"",
        b"{}",
        b" " * (1 << 17),
        OwnerRecord(epoch=7, host="h", pid=1, process="").to_bytes(),
    ],
    ids=["no JSON", "empty", "no seal", "large", "of another epoch"],
)
@pytest.mark.parametrize("epoch", [1, 99_999_999])
def test_an_unreadable_owner_is_watched_and_succeeded(
    objects: ObjectStore, data: bytes, epoch: int
) -> None:
    objects.put(f"owners/{epoch:08d}.json", [data])
    told: list[str] = []
    first = RunOwner.claim(objects, patience=0.2, tell=told.append)
    assert first.epoch == epoch + 1
    assert f"an unknown driver (owners/{epoch:08d}.json" in told[0]
    first.beat()
    assert first.newer is None
    first.release()
    assert RunOwner.claim(objects, patience=30).epoch == epoch + 2


def test_an_unreadable_owner_is_taken_over_at_once(objects: ObjectStore) -> None:
    objects.put("owners/00000001.json", [b"x"])
    assert RunOwner.claim(objects, patience=600, take_over=True).epoch == 2


def test_an_unreadable_owner_that_beats_is_left_alone(objects: ObjectStore) -> None:
    objects.put("owners/00000001.json", [b"x"])
    timer = threading.Timer(0.3, put_owner, [objects], {"beat": 1})
    timer.start()
    with pytest.raises(RunOwnedElsewhere, match="an unknown driver"):
        RunOwner.claim(objects, patience=5)
    timer.join()
