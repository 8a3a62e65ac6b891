"""The driver on real Ray with an engine that fails on purpose: who is retried and who is blamed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.config import RunConfig
from jobs.errors import (
    ExitCode,
    RunStopped,
)
from jobs.status import read_status
from store.objects.open import open_store
from tests.jobs.driven import TEXTS, Driven, names, statuses

pytestmark = pytest.mark.usefixtures("faults")


@pytest.fixture
def drive(ray_address: str) -> Driven:
    return Driven(ray_address)


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


def test_workers_that_never_start_stop_the_run(
    drive: Driven,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
) -> None:
    faults(start="no such architecture")
    with pytest.raises(RunStopped, match="no such architecture"):
        drive(make_config(write_prompts(TEXTS)))


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
