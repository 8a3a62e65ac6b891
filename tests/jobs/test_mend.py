"""`run --repair` of damage that is in no unit: deleted, made again, named, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import jobs.driver
from jobs.config import RunConfig
from jobs.errors import ExitCode, RunInterrupted, RunStopped
from jobs.messages import PoolEvent
from jobs.prepare import read_manifest
from jobs.snapshots import SnapshotKeeper
from jobs.start_once import start_once
from store import keys, open_run
from store.commit import committed_units
from store.errors import DamagedObject
from store.objects.open import open_store
from store.objects.protocol import ObjectStore
from store.snapshot import find_committed, snapshot_names, write_snapshot
from store.verify import verify_run
from store.weights import weight_key
from tests.jobs.driven import TEXTS, Driven, break_unit
from tests.jobs.fake_worker import FakeWorker
from tests.jobs.local_pool import LocalPool


@pytest.fixture
def made(drive: Driven) -> tuple[RunConfig, ObjectStore]:
    config = drive.config(TEXTS)
    drive(config)
    objects = open_store(config.output)
    assert verify_run(objects, deep=True).ok
    return config, objects


def spoil(objects: ObjectStore, name: str) -> None:
    objects.put(name, [objects.get(name, max_bytes=1 << 20), b"x"])


@pytest.mark.parametrize("what", ["units.parquet", "manifest.json", "latest.json"])
@pytest.mark.parametrize("unit", [None, 2])
def test_a_damaged_snapshot_is_made_again(
    drive: Driven, made: tuple[RunConfig, ObjectStore], what: str, unit: int | None
) -> None:
    config, objects = made
    name = write_snapshot(objects, read_manifest(objects).run_id).name
    spoil(objects, f"snapshots/{what}" if "latest" in what else f"snapshots/{name}/{what}")
    if unit is not None:
        break_unit(objects, unit)
    assert drive(config, repair=True, deep=True).exit_code is ExitCode.DONE
    assert verify_run(objects, deep=True).problems == []
    assert find_committed(objects, read_manifest(objects).run_id).snapshot is not None
    assert len(drive.events("committed")) == 6 + (unit is not None)
    assert snapshot_names(objects)


@pytest.mark.parametrize("name", ["checks/self-check.json", "owners/00000001.json"])
def test_what_is_advisory_is_deleted(
    drive: Driven, made: tuple[RunConfig, ObjectStore], name: str
) -> None:
    config, objects = made
    objects.put(name, [b"x"])
    assert drive(config, repair=True, deep=True).exit_code is ExitCode.DONE
    assert name not in {info.name for info in objects.list("")}
    assert verify_run(objects, deep=True).problems == []
    assert not drive.events("starting")[1:]


def test_what_nothing_makes_again_is_named_and_stops_nothing(
    drive: Driven, made: tuple[RunConfig, ObjectStore]
) -> None:
    config, objects = made
    open_run(objects.url).save_summary("scores", pa.table({"prompt_id": ["p0"], "score": [0.5]}))
    spoil(objects, "summaries/scores.json")
    objects.put("weights/notes.txt", [b"mine"])
    break_unit(objects, 3)
    assert drive(config, repair=True).exit_code is ExitCode.DONE
    left = {str(event["name"]): str(event["detail"]) for event in drive.events("not repaired")}
    assert set(left) == {"summaries/scores.json", "weights/notes.txt"}
    assert "delete it" in left["weights/notes.txt"]
    assert committed_units(objects)[3] == keys.commit_key(3, 1)
    assert {one.name for one in verify_run(objects).problems} == set(left)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("unit", [None, 4])
def test_a_damaged_projection_is_stored_anew_and_no_sound_unit_with_it(
    drive: Driven, unit: int | None, lost: bool
) -> None:
    config = drive.config(TEXTS, capture={"output_weights": True})
    drive(config)
    objects = open_store(config.output)
    sound = objects.get(weight_key(0), max_bytes=1 << 20)
    objects.delete(weight_key(0)) if lost else objects.put(weight_key(0), [b"x"])
    if unit is not None:
        break_unit(objects, unit)
    assert drive(config, repair=True).exit_code is ExitCode.DONE
    assert objects.get(weight_key(0), max_bytes=1 << 20) == sound
    again = {} if unit is None else {unit: keys.commit_key(unit, 1)}
    assert committed_units(objects) == {u: keys.commit_key(u) for u in range(6)} | again
    assert verify_run(objects, deep=True).problems == []
    assert [event["names"] for event in drive.events("stored anew")] == (
        [[weight_key(0)]] if unit is None else []
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [({"start": "no memory"}, "RuntimeError: no memory"), ({"weightless": 1}, "did not store it")],
)
def test_an_engine_that_stores_no_projection_ends_the_repair(
    drive: Driven, fault: dict[str, Any], message: str
) -> None:
    config = drive.config(TEXTS, capture={"output_weights": True})
    drive(config)
    open_store(config.output).delete(weight_key(0))
    drive.faults(**fault)
    with pytest.raises(RunStopped, match=message):
        drive(config, repair=True)
    drive.faults()
    assert drive(config, repair=True).exit_code is ExitCode.DONE


def test_an_engine_that_does_not_start_in_time_interrupts(drive: Driven) -> None:
    class Silent(LocalPool):
        def poll(self, timeout: float) -> list[PoolEvent]:
            return []

    pool = Silent(drive.config(TEXTS), None, FakeWorker)  # type: ignore[arg-type]
    with pytest.raises(RunInterrupted, match=r"within 0\.01 s"):
        start_once(pool, 0.01)


@pytest.mark.parametrize("name", [keys.MODEL, "plan/0000/manifest.json"])
def test_what_all_reading_rests_on_is_refused_before_anything_is_deleted(
    drive: Driven, made: tuple[RunConfig, ObjectStore], name: str
) -> None:
    config, objects = made
    objects.put("checks/self-check.json", [b"x"])
    spoil(objects, name)
    with pytest.raises(DamagedObject, match=name):
        drive(config, repair=True, deep=True)
    assert "checks/self-check.json" in {info.name for info in objects.list("")}


def test_a_lost_commit_of_a_damaged_snapshot_is_captured_anew(
    drive: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "UNITS_PER_FOLDER", 2)
    monkeypatch.setattr(jobs.driver, "SnapshotKeeper", partial(SnapshotKeeper, every=6))
    config = drive.config(TEXTS)
    drive(config)
    objects = open_store(config.output)
    objects.delete(committed_units(objects)[1])
    spoil(objects, f"snapshots/{snapshot_names(objects)[-1]}/exceptions.parquet")
    assert drive(config, repair=True).exit_code is ExitCode.DONE
    assert verify_run(objects, deep=True).problems == []
