"""What a driver makes of a config and of what its workers report, with workers in this process."""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

import jobs.dispatch
import jobs.driver
import jobs.owner
import jobs.ray_pool
import jobs.watch
import jobs.worker
import store.keys
from jobs.errors import (
    ConfigError,
    ExitCode,
    InputsChanged,
    QuotaExceeded,
    RunInterrupted,
    RunStopped,
    SourceError,
)
from jobs.owner import RunOwner
from jobs.policy import MAX_STORE_FAILURES
from jobs.prepare import read_manifest
from jobs.snapshots import SnapshotKeeper
from jobs.status import read_status
from store.commit import committed_units, read_commit
from store.errors import StoreError, StoreRefused
from store.objects.open import open_store
from store.snapshot import find_committed
from store.verify import verify_run
from tests.jobs.driven import TEXTS, Driven, break_unit, names, statuses
from tests.jobs.local_pool import LocalPool


def test_a_unit_none_of_whose_prompts_survives_is_quarantined(drive: Driven) -> None:
    drive.faults(tokens={"14": "raise", "15": "raise"})
    config = drive.config(TEXTS, workers={"max_attempts": 1})
    outcome = drive(config)
    assert outcome.exit_code is ExitCode.SOME_FAILED
    assert outcome.status.as_json() == {
        "units": {"planned": 6, "committed": 5, "quarantined": 1},
        "prompts": {"planned": 12, "stored": 10, "failed": 2, "skipped": 0},
        "bytes": outcome.status.bytes,
    }


def test_the_same_error_everywhere_stops_the_run(drive: Driven) -> None:
    drive.faults(unit_error="RowsMissing: unit 7: rank 0 proved 12 rows")
    with pytest.raises(RunStopped, match="fails the same way"):
        drive(drive.config(TEXTS))


def test_an_error_that_only_quotes_a_failing_store_is_charged_to_its_unit(drive: Driven) -> None:
    drive.faults(unit_error="ConnectionRefusedError: [Errno 111] Connection refused")
    with pytest.raises(RunStopped, match="fails the same way"):
        drive(drive.config(TEXTS))
    assert not drive.events("store failing")


def test_a_store_that_fails_for_a_while_charges_nobody(drive: Driven, tmp_path: Path) -> None:
    gate = tmp_path / "mended"
    drive.faults(unit_error="OSError: full", store_failed=True, unless_exists=str(gate))

    def mend(_event: str, **_fields: object) -> None:
        if len(drive.events("store failing")) == 2:
            gate.touch()

    drive.also = mend
    assert drive(drive.config(TEXTS)).exit_code is ExitCode.DONE
    assert gate.exists()
    assert not drive.events("unit failed")


def test_a_unit_reported_done_without_a_commit_is_not_believed(drive: Driven) -> None:
    drive.faults(lie=3)
    config = drive.config(TEXTS)
    with pytest.raises(RunInterrupted, match="1 of 6 have no commit"):
        drive(config)
    drive.faults()
    assert drive(config).exit_code is ExitCode.DONE
    assert set(statuses(config).values()) == {("stored", None)}


def test_a_store_that_never_recovers_ends_the_run_to_be_run_again(drive: Driven) -> None:
    drive.faults(unit_error="StoreError: gone", store_failed=True)
    config = drive.config(TEXTS, workers={"store_patience_seconds": 3})
    with pytest.raises(RunInterrupted, match="the store has failed"):
        drive(config)
    drive.faults()
    assert drive(config).exit_code is ExitCode.DONE


@pytest.mark.parametrize("others_first", [False, True])
def test_a_unit_that_a_working_object_store_refuses_ends_as_failed_with_its_error(
    drive: Driven, monkeypatch: pytest.MonkeyPatch, others_first: bool
) -> None:
    """Also where it is the only one left, so that no other unit's commit shows that it works."""
    monkeypatch.setattr(jobs.dispatch, "MAX_PAUSE_SECONDS", 0.01)
    config = drive.config(TEXTS, output=f"memory://driver-{secrets.token_hex(4)}")
    if others_first:
        drive.faults(lie=2)
        with pytest.raises(RunInterrupted, match="1 of 6 have no commit"):
            drive(config)
    drive.faults(refused=2)
    assert drive(config).exit_code is ExitCode.SOME_FAILED
    found = list(statuses(config).values())
    assert [status for status, _ in found] == ["stored"] * 4 + ["failed"] * 2 + ["stored"] * 6
    assert all(str(reason).endswith("again and again: 403 for it") for _, reason in found[4:6])
    assert len(drive.events("store failed")) == MAX_STORE_FAILURES
    assert verify_run(open_store(config.output), deep=True).problems == []


def test_damaged_units_are_captured_again_as_repairs(drive: Driven) -> None:
    config = drive.config(TEXTS)
    drive(config)
    objects = open_store(config.output)
    break_unit(objects, 2)
    drive(config, repair=True)
    assert committed_units(objects)[2] == "commits/000000/00000002.r1.json"
    assert len(drive.events("committed")) == 7
    assert verify_run(objects, deep=True).ok
    drive(config, repair=True)
    assert len(drive.events("nothing to do")) == 1


@pytest.mark.parametrize("snapshot", [None, "open folder", "complete folder"])
def test_a_unit_whose_commit_was_deleted_is_captured_anew(
    drive: Driven, monkeypatch: pytest.MonkeyPatch, snapshot: str | None
) -> None:
    """Also where a snapshot names it; in a complete folder of one that takes a verification."""
    if snapshot == "complete folder":
        monkeypatch.setattr(store.keys, "UNITS_PER_FOLDER", 2)
    if snapshot is not None:
        monkeypatch.setattr(jobs.driver, "SnapshotKeeper", partial(SnapshotKeeper, every=6))
    config = drive.config(TEXTS)
    drive(config)
    objects = open_store(config.output)
    lost = committed_units(objects)[1]
    first = read_commit(objects, lost).attempt
    objects.delete(lost)
    if snapshot == "complete folder":
        assert find_committed(objects, read_manifest(objects).run_id).complete_folders == 3
        assert verify_run(objects).damaged_units == [1]
    else:
        assert read_status(objects).as_json()["units"]["committed"] == 5
        assert verify_run(objects).ok is (snapshot is None)
    drive(config, repair=snapshot == "complete folder")
    assert len(drive.events("committed")) == 7
    assert drive.events("committed")[-1]["unit"] == 1
    assert read_commit(objects, committed_units(objects)[1]).attempt != first
    assert read_status(objects).complete
    assert verify_run(objects, deep=True).ok


def test_going_on_needs_nothing_but_the_store(drive: Driven, tmp_path: Path) -> None:
    config = drive.config(TEXTS)
    drive(config)
    objects = open_store(config.output)
    objects.delete(committed_units(objects)[4])
    (tmp_path / "prompts.jsonl").unlink()
    assert drive(config).exit_code is ExitCode.DONE
    assert "going on from the stored plan" in str(drive.events("source not readable")[0]["detail"])
    assert set(statuses(config).values()) == {("stored", None)}


def test_a_quota_that_cannot_hold_the_run_refuses_it_before_any_worker(drive: Driven) -> None:
    with pytest.raises(QuotaExceeded, match="Raise max_bytes"):
        drive(drive.config(TEXTS, max_bytes=10_000))
    assert not drive.events("worker asked for")


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        ({"model_type": "mamba"}, {}, "state-space"),
        ({}, {"pipeline_parallel_size": 2}, r"engine\.options\.pipeline_parallel_size"),
    ],
    ids=["model", "option"],
)
def test_a_model_or_option_of_unfaithful_rows_is_refused_before_anything_is_written(
    drive: Driven,
    tmp_path: Path,
    word_model: Path,
    model: dict[str, str],
    options: dict[str, int],
    text: str,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(word_model, folder)
    body = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**body, **model}))
    config = drive.config(TEXTS, model={"path": str(folder)}, engine={"options": options})
    with pytest.raises(ConfigError, match=text):
        drive(config)
    assert not Path(config.output, "run.json").exists()


def test_a_quota_reached_on_the_way_ends_the_run_cleanly(drive: Driven) -> None:
    drive.faults(bytes_per_token=40_000)
    config = drive.config(TEXTS, max_bytes=1_000_000, engine={"units_in_flight": 1})
    with pytest.raises(RunStopped, match="max_bytes"):
        drive(config)
    done = read_status(open_store(config.output))
    assert 2 < done.units_committed < 6
    assert len(drive.events("assigned")) == done.units_committed


def test_snapshots_are_left_on_the_way_and_status_reads_them(
    drive: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.driver, "SnapshotKeeper", partial(SnapshotKeeper, every=3))
    config = drive.config([*TEXTS, ""])
    outcome = drive(config)
    objects = open_store(config.output)
    found = find_committed(objects, read_manifest(objects).run_id)
    assert found.snapshot is not None
    assert len(found.columns["unit"]) >= 3
    assert outcome.status.as_json()["prompts"]["stored"] == 12
    assert outcome.status.complete
    assert drive(config).exit_code is ExitCode.SOME_FAILED


def test_extending_adds_a_segment_once_and_keeps_what_is_stored(drive: Driven) -> None:
    first = drive.config(TEXTS)
    drive(first)
    before = {name for name in names(first) if "owners/" not in name}
    more = [{"id": f"more-{i}", "text": "w7 w8"} for i in range(5)]
    second = drive.config(more, "more.jsonl")
    with pytest.raises(InputsChanged, match="--extend"):
        drive(second)
    drive(second, extend=True)
    assert before < set(names(second))
    assert len(statuses(second)) == 17
    assert set(statuses(second).values()) == {("stored", None)}
    after = names(second)
    drive(second, extend=True)
    assert [n for n in names(second) if "owners/" not in n] == [
        n for n in after if "owners/" not in n
    ]
    assert drive(first).exit_code is ExitCode.DONE
    drive(drive.config([{"id": "last", "text": "w9"}], "last.jsonl"), extend=True)
    for planned in (first, second):  # Whichever of its segments is meant, the same command again.
        assert drive(planned, extend=True).exit_code is ExitCode.DONE
    assert len(statuses(second)) == 18


def test_prompts_left_out_by_the_config_count_as_skipped(drive: Driven) -> None:
    config = drive.config(TEXTS, prompts={"skip": ["p3", "p8"]})
    outcome = drive(config)
    assert outcome.exit_code is ExitCode.DONE
    prompts = {"planned": 12, "stored": 10, "failed": 0, "skipped": 2}
    assert outcome.status.as_json()["prompts"] == prompts
    assert statuses(config)["p3"] == ("skipped", "skipped: listed in prompts.skip")


def test_a_run_killed_while_planning_is_planned_anew(drive: Driven) -> None:
    repeated = [{"id": "a", "text": "w1"}, {"id": "a", "text": "w2"}]
    with pytest.raises(SourceError, match="'a'"):
        drive(drive.config(repeated))
    config = drive.config(repeated, prompts={"id_column": None})
    assert drive(config).exit_code is ExitCode.DONE
    assert set(statuses(config)) == {"p0", "p1"}


def test_a_cluster_without_a_node_left_ends_the_run_at_once_to_be_run_again(
    drive: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.watch, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(LocalPool, "has_nodes", lambda _pool: False)
    config = drive.config(TEXTS)
    with pytest.raises(RunInterrupted, match="no node of the Ray cluster is left"):
        drive(config)
    monkeypatch.setattr(LocalPool, "has_nodes", lambda _pool: True)
    assert drive(config).exit_code is ExitCode.DONE
    assert set(statuses(config).values()) == {("stored", None)}


def test_a_signal_that_meets_the_driver_while_it_logs_drains_the_run(
    drive: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that logged itself would wait for the log's lock for ever."""
    write = io.StringIO.write
    sent: list[int] = []

    def write_and_signal(stream: io.StringIO, text: str) -> int:
        if '"committed"' in text and not sent:
            sent.append(len(drive.events("assigned")))
            os.kill(os.getpid(), signal.SIGTERM)
        return write(stream, text)

    class Stream(io.StringIO):
        write = write_and_signal  # type: ignore[assignment]

    drive.stream = Stream()
    config = drive.config(TEXTS * 5)
    with pytest.raises(RunInterrupted, match="SIGTERM: stopped after what was in flight"):
        drive(config)
    assert len(drive.events("stopping")) == 1
    status = read_status(open_store(config.output))
    assert status.units_committed == len(drive.events("assigned"))
    assert status.units_committed < status.units_planned


def test_a_driver_that_was_taken_over_drains_and_says_by_whom(
    drive: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive.faults(seconds=0.05)
    monkeypatch.setattr(jobs.watch, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(jobs.owner, "BEAT_SECONDS", 0.05)
    config = drive.config(TEXTS * 5)
    taken: list[RunOwner] = []

    def take(event: str, **_fields: object) -> None:
        if event == "committed" and not taken:
            taken.append(RunOwner.claim(open_store(config.output), take_over=True))

    drive.also = take
    with pytest.raises(RunInterrupted, match="took this run over"):
        drive(config)
    taken[0].release()
    status = read_status(open_store(config.output))
    assert 0 < status.units_committed < status.units_planned
    assert len(drive.events("assigned")) == status.units_committed


@pytest.mark.parametrize("call", ["find_run", "read_status"])
def test_an_outage_before_or_after_the_work_says_to_run_again(
    drive: Driven, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def away(*_: object) -> None:
        raise StoreError("connection refused")

    monkeypatch.setattr(jobs.driver, call, away)
    with pytest.raises(RunInterrupted, match=r"connection refused.*run the same command again"):
        drive(drive.config(TEXTS))


def test_a_store_that_is_full_when_a_run_is_claimed_says_to_run_again(
    drive: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        error = StoreError("No space left on device")
        error.errno = errno.ENOSPC
        raise error

    monkeypatch.setattr(RunOwner, "claim", full)
    with pytest.raises(RunInterrupted, match="No space left"):
        drive(drive.config(TEXTS))


def test_what_only_a_person_can_change_is_no_outage(
    drive: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise StoreRefused("not allowed to use run.json")

    monkeypatch.setattr(jobs.driver, "find_run", denied)
    with pytest.raises(StoreRefused):
        drive(drive.config(TEXTS))
