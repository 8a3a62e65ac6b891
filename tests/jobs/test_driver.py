"""The driver on real Ray with an engine that fails on purpose: who is retried and who is blamed."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import jobs.driver
from jobs.config import RunConfig
from jobs.driver import RunOptions, RunOutcome
from jobs.driver import run as run_job
from jobs.errors import (
    ConfigError,
    ExitCode,
    InputsChanged,
    QuotaExceeded,
    RunInterrupted,
    RunStopped,
    SourceError,
)
from jobs.event_log import EventLog
from jobs.listing import prompt_rows
from jobs.progress import progress_view
from jobs.snapshots import SnapshotKeeper
from jobs.status import read_status
from store.commit import committed_units, read_commit
from store.objects.open import open_store
from store.snapshot import find_committed
from store.verify import verify_run
from tests.jobs.fake_worker import FakeWorker

pytestmark = pytest.mark.usefixtures("faults")

TEXTS = [f"w{i} w1 w2 w3" for i in range(10, 22)]
"""Twelve prompts of four tokens, two a unit."""


class Driven:
    """Runs configs with the fake worker and keeps the log."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.stream = io.StringIO()
        self.also: Callable[..., None] = lambda _event, **_fields: None

    def __call__(self, config: RunConfig, **options: bool) -> RunOutcome:
        log = NoticedLog(self)
        if config.workers.address is None:
            workers = config.workers.model_copy(update={"address": self.address})
            config = config.model_copy(update={"workers": workers})
        view = lambda: progress_view(as_json=True, stream=io.StringIO())  # noqa: E731
        return run_job(config, RunOptions(worker=FakeWorker, **options), log, view)

    def events(self, name: str) -> list[dict[str, object]]:
        events = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [event for event in events if event["event"] == name]


class NoticedLog(EventLog):
    """Tells the test of each event too."""

    def __init__(self, driven: Driven) -> None:
        super().__init__(stream=driven.stream, as_json=True, every_unit=True)
        self._driven = driven

    def __call__(self, event: str, **fields: object) -> None:
        super().__call__(event, **fields)
        self._driven.also(event, **fields)


@pytest.fixture
def drive(ray_address: str) -> Driven:
    return Driven(ray_address)


def statuses(config: RunConfig) -> dict[str, tuple[str, str | None]]:
    rows = prompt_rows(open_store(config.output))
    return {row.prompt_id: (row.status, row.reason) for row in rows}


def names(config: RunConfig) -> list[str]:
    return sorted(p.as_posix() for p in Path(config.output).rglob("*") if p.is_file())


def test_a_run_stores_every_prompt_once_and_running_again_changes_nothing(
    drive: Driven, make_config: Callable[..., RunConfig], write_prompts: Callable[..., Path]
) -> None:
    config = make_config(write_prompts([*TEXTS, ""]), workers={"count": 2})
    outcome = drive(config)
    assert outcome.exit_code is ExitCode.SOME_FAILED
    found = statuses(config)
    assert found.pop("p12") == ("failed", "it is empty: no tokens to capture")
    assert set(found.values()) == {("stored", None)}
    assert len(drive.events("committed")) == outcome.status.units_planned
    before = names(config)
    assert drive(config).exit_code is ExitCode.SOME_FAILED
    assert names(config) == before
    assert len(drive.events("nothing to do")) == 1


def test_a_killed_worker_is_replaced_and_its_units_run_again(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
    tmp_path: Path,
) -> None:
    faults(tokens={"13": {"once": str(tmp_path / "killed")}})
    config = make_config(write_prompts(TEXTS))
    assert drive(config).exit_code is ExitCode.DONE
    assert len(drive.events("worker lost: engine died")) == 1
    assert set(statuses(config).values()) == {("stored", None)}


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_poison_prompt_is_found_alone_and_the_rest_of_its_unit_is_stored(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
    fault: str,
) -> None:
    faults(tokens={"15": fault})
    config = make_config(write_prompts(TEXTS), workers={"max_attempts": 2})
    assert drive(config).exit_code is ExitCode.SOME_FAILED
    found = statuses(config)
    status, reason = found.pop("p5")
    assert status == "failed"
    assert reason is not None
    assert reason.startswith("quarantined: it failed 2 times running alone")
    if fault == "raise":
        assert "poisoned by token 15" in reason
    assert set(found.values()) == {("stored", None)}
    status_now = read_status(open_store(config.output))
    assert status_now.units_quarantined == 0
    assert status_now.complete


def test_a_hung_worker_is_killed_at_its_deadline(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
) -> None:
    faults(tokens={"15": "hang"})
    config = make_config(
        write_prompts(TEXTS), workers={"max_attempts": 1, "unit_deadline_seconds": 1.5}
    )
    assert drive(config).exit_code is ExitCode.SOME_FAILED
    assert len(drive.events("worker lost: deadline passed")) == 3
    failed = {name for name, (status, _) in statuses(config).items() if status == "failed"}
    assert failed == {"p5"}


def test_a_unit_none_of_whose_prompts_survives_is_quarantined(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
) -> None:
    faults(tokens={"14": "raise", "15": "raise"})
    config = make_config(write_prompts(TEXTS), workers={"max_attempts": 1})
    outcome = drive(config)
    assert outcome.exit_code is ExitCode.SOME_FAILED
    assert outcome.status.as_json() == {
        "units": {"planned": 6, "committed": 5, "quarantined": 1},
        "prompts": {"planned": 12, "stored": 10, "failed": 2, "skipped": 0},
        "bytes": outcome.status.bytes,
    }


def test_the_same_error_everywhere_stops_the_run(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
) -> None:
    faults(unit_error="RowsMissing: unit 7: rank 0 proved 12 rows")
    with pytest.raises(RunStopped, match="fails the same way"):
        drive(make_config(write_prompts(TEXTS)))


def test_workers_that_never_start_stop_the_run(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
) -> None:
    faults(start="no such architecture")
    with pytest.raises(RunStopped, match="no such architecture"):
        drive(make_config(write_prompts(TEXTS)))


def test_a_store_that_fails_for_a_while_charges_nobody(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
    tmp_path: Path,
) -> None:
    import threading

    gate = tmp_path / "mended"
    faults(unit_error="OSError: [Errno 28] No space left on device", unless_exists=str(gate))
    timer = threading.Timer(12.0, gate.touch)
    timer.start()
    assert drive(make_config(write_prompts(TEXTS))).exit_code is ExitCode.DONE
    timer.join()
    assert drive.events("store failing")
    assert not drive.events("unit failed")


def test_a_unit_reported_done_without_a_commit_is_not_believed(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
) -> None:
    faults(lie=3)
    config = make_config(write_prompts(TEXTS))
    with pytest.raises(RunInterrupted, match="1 of 6 have no commit"):
        drive(config)
    faults()
    assert drive(config).exit_code is ExitCode.DONE
    assert set(statuses(config).values()) == {("stored", None)}


def test_a_store_that_never_recovers_ends_the_run_to_be_run_again(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
) -> None:
    faults(unit_error="StoreError: gone")
    config = make_config(write_prompts(TEXTS), workers={"store_patience_seconds": 3})
    with pytest.raises(RunInterrupted, match="the store has failed"):
        drive(config)
    faults()
    assert drive(config).exit_code is ExitCode.DONE


def test_damaged_units_are_captured_again_as_repairs(
    drive: Driven, make_config: Callable[..., RunConfig], write_prompts: Callable[..., Path]
) -> None:
    config = make_config(write_prompts(TEXTS))
    drive(config)
    objects = open_store(config.output)
    broken = read_commit(objects, committed_units(objects)[2])
    objects.delete(f"data/{broken.unit:08d}/{broken.attempt}/zarr.json")
    drive(config, repair=True)
    assert committed_units(objects)[2] == "commits/000000/00000002.r1.json"
    assert len(drive.events("committed")) == 7
    assert verify_run(objects, deep=True).ok
    drive(config, repair=True)
    assert len(drive.events("nothing to do")) == 1


def test_a_quota_that_cannot_hold_the_run_refuses_it_before_any_worker(
    drive: Driven, make_config: Callable[..., RunConfig], write_prompts: Callable[..., Path]
) -> None:
    with pytest.raises(QuotaExceeded, match="Raise max_bytes"):
        drive(make_config(write_prompts(TEXTS), max_bytes=10_000))
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
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
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
    config = make_config(
        write_prompts(TEXTS), model={"path": str(folder)}, engine={"options": options}
    )
    with pytest.raises(ConfigError, match=text):
        drive(config)
    assert not Path(config.output, "run.json").exists()


def test_a_quota_reached_on_the_way_ends_the_run_cleanly(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
) -> None:
    faults(bytes_per_token=40_000)
    config = make_config(write_prompts(TEXTS), max_bytes=1_000_000, engine={"units_in_flight": 1})
    with pytest.raises(RunStopped, match="max_bytes"):
        drive(config)
    done = read_status(open_store(config.output))
    assert 2 < done.units_committed < 6
    assert len(drive.events("assigned")) == done.units_committed


def test_snapshots_are_left_on_the_way_and_status_reads_them(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs.driver, "SnapshotKeeper", partial(SnapshotKeeper, every=3))
    config = make_config(write_prompts([*TEXTS, ""]))
    outcome = drive(config)
    found = find_committed(open_store(config.output))
    assert found.snapshot is not None
    assert len(found.columns["unit"]) >= 3
    assert outcome.status.as_json()["prompts"]["stored"] == 12
    assert outcome.status.complete
    assert drive(config).exit_code is ExitCode.SOME_FAILED


def test_extending_adds_a_segment_once_and_keeps_what_is_stored(
    drive: Driven, make_config: Callable[..., RunConfig], write_prompts: Callable[..., Path]
) -> None:
    first = make_config(write_prompts(TEXTS))
    drive(first)
    before = {name for name in names(first) if "owners/" not in name}
    more = [{"id": f"more-{i}", "text": "w7 w8"} for i in range(5)]
    second = make_config(write_prompts(more, "more.jsonl"))
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


def test_prompts_left_out_by_the_config_count_as_skipped(
    drive: Driven, make_config: Callable[..., RunConfig], write_prompts: Callable[..., Path]
) -> None:
    config = make_config(write_prompts(TEXTS), prompts={"skip": ["p3", "p8"]})
    outcome = drive(config)
    assert outcome.exit_code is ExitCode.DONE
    prompts = {"planned": 12, "stored": 10, "failed": 0, "skipped": 2}
    assert outcome.status.as_json()["prompts"] == prompts
    assert statuses(config)["p3"] == ("skipped", "skipped: listed in prompts.skip")


def test_a_run_killed_while_planning_is_planned_anew(
    drive: Driven, make_config: Callable[..., RunConfig], write_prompts: Callable[..., Path]
) -> None:
    repeated = write_prompts([{"id": "a", "text": "w1"}, {"id": "a", "text": "w2"}])
    with pytest.raises(SourceError, match="'a'"):
        drive(make_config(repeated))
    config = make_config(repeated, prompts={"id_column": None})
    assert drive(config).exit_code is ExitCode.DONE
    assert set(statuses(config)) == {"p0", "p1"}


def test_workers_come_and_go_between_their_bounds(
    drive: Driven, make_config: Callable[..., RunConfig], write_prompts: Callable[..., Path]
) -> None:
    config = make_config(write_prompts(TEXTS), workers={"min": 1, "max": 3})
    assert drive(config).exit_code is ExitCode.DONE
    assert len(drive.events("worker asked for")) == 3


def test_a_node_told_to_leave_gets_nothing_new_and_is_left(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
) -> None:
    from ray._raylet import GcsClient
    from ray.cluster_utils import Cluster
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    faults(seconds=0.1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        config = make_config(
            write_prompts(TEXTS * 12),
            workers={"address": cluster.address, "count": 2, "num_cpus": 1},
        )
        told: list[str] = []

        def drain_first(_event: str, **_fields: object) -> None:
            started = drive.events("worker started")
            if started and not told and len(drive.events("committed")) > 2:
                told.append(str(started[0]["node"]))
                deadline = int((time.time() + 600) * 1000)
                reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
                gcs = GcsClient(address=cluster.address)
                assert gcs.drain_node(told[0], reason, "spot notice", deadline)[0]

        drive.also = drain_first
        assert drive(config).exit_code is ExitCode.DONE
        assert drive.events("draining")[0]["node"] == told[0]
        assert [e for e in drive.events("worker released") if e.get("why")]
        assert not drive.events("worker lost: engine died")
    finally:
        cluster.shutdown()
