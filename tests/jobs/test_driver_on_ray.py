"""The driver on real Ray with an engine that fails on purpose: who is retried and who is blamed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import (
    ExitCode,
    RunInterrupted,
    RunStopped,
)
from jobs.status import read_status
from store.objects.open import open_store
from store.verify import verify_run
from store.weights import weight_key
from tests.jobs.driven import TEXTS, Driven, names, statuses

pytestmark = pytest.mark.ray


@pytest.fixture
def drive(ray_address: str, driven: Driven) -> Driven:
    driven.address = ray_address
    return driven


def test_a_run_stores_every_prompt_once_and_running_again_changes_nothing(drive: Driven) -> None:
    config = drive.config([*TEXTS, ""], workers={"count": 2})
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


def test_a_killed_worker_is_replaced_and_its_units_run_again(drive: Driven, tmp_path: Path) -> None:
    drive.faults(tokens={"13": {"once": str(tmp_path / "killed")}})
    config = drive.config(TEXTS)
    assert drive(config).exit_code is ExitCode.DONE
    assert len(drive.events("worker lost: engine died")) == 1
    assert set(statuses(config).values()) == {("stored", None)}


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_poison_prompt_is_found_alone_and_the_rest_of_its_unit_is_stored(
    drive: Driven, fault: str
) -> None:
    drive.faults(tokens={"15": fault})
    config = drive.config(TEXTS, workers={"max_attempts": 2})
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


def test_a_hung_worker_is_killed_at_its_deadline(drive: Driven) -> None:
    drive.faults(tokens={"15": "hang"})
    config = drive.config(TEXTS, workers={"max_attempts": 1, "unit_deadline_seconds": 1.5})
    assert drive(config).exit_code is ExitCode.SOME_FAILED
    assert len(drive.events("worker lost: deadline passed")) == 3
    failed = {name for name, (status, _) in statuses(config).items() if status == "failed"}
    assert failed == {"p5"}


def test_a_ray_that_does_not_start_interrupts_the_run(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with too much to do; nothing was lost, so running again goes on."""

    def give_up(**_options: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", give_up)
    with pytest.raises(RunInterrupted, match="timed out during startup"):
        driven(driven.config(TEXTS))


def test_a_lost_projection_is_stored_by_an_engine_that_captures_nothing(drive: Driven) -> None:
    config = drive.config(TEXTS, capture={"output_weights": True})
    drive(config)
    objects = open_store(config.output)
    objects.delete(weight_key(0))
    assert drive(config, repair=True).exit_code is ExitCode.DONE
    assert len(drive.events("stored anew")) == 1
    assert len(drive.events("committed")) == 6
    assert verify_run(objects, deep=True).problems == []


def test_workers_that_never_start_stop_the_run(drive: Driven) -> None:
    drive.faults(start="no such architecture")
    with pytest.raises(RunStopped, match="no such architecture"):
        drive(drive.config(TEXTS))


def test_workers_come_and_go_between_their_bounds(drive: Driven) -> None:
    config = drive.config(TEXTS, workers={"min": 1, "max": 3})
    assert drive(config).exit_code is ExitCode.DONE
    assert len(drive.events("worker asked for")) == 3


@pytest.fixture
def two_nodes() -> Iterator[tuple[Any, list[Any]]]:
    """A head that runs no worker, and two nodes with room for one each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
        yield cluster, nodes
    finally:
        cluster.shutdown()


def test_nodes_told_to_leave_are_left_and_a_killed_one_costs_its_units_nothing(
    driven: Driven, two_nodes: tuple[Any, list[Any]], tmp_path: Path
) -> None:
    """Two workers on two nodes: one node is told to leave, a third joins, the second is killed."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    cluster, nodes = two_nodes
    struck = tmp_path / "struck"
    driven.faults(seconds=0.1, unless_exists=str(struck))
    config = driven.config(
        TEXTS * 25, workers={"address": cluster.address, "count": 2, "num_cpus": 1}
    )
    told: list[str] = []
    killed: list[str] = []

    def strike(event: str, **_fields: object) -> None:
        if event not in {"committed", "worker started"}:
            return
        started = [str(one["node"]) for one in driven.events("worker started")]
        if len(started) >= 2 and not told and len(driven.events("committed")) > 2:
            told.append(started[0])
            deadline = int((time.time() + 600) * 1000)
            reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            gcs = GcsClient(address=cluster.address)
            assert gcs.drain_node(told[0], reason, "spot notice", deadline)[0]
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        if len(started) == 3 and not killed:
            victim = next(node for node in nodes if node.node_id not in told)
            killed.append(victim.node_id)
            cluster.remove_node(victim, allow_graceful=False)
            struck.touch()  # The rest goes as fast as it can.

    driven.also = strike
    assert driven(config).exit_code is ExitCode.DONE
    assert driven.events("draining")[0]["node"] == told[0]
    assert [e for e in driven.events("worker released") if e.get("why")]
    (lost,) = driven.events("worker lost: node lost")
    started = {e["worker"]: e["node"] for e in driven.events("worker started")}
    assert started[lost["worker"]] == killed[0]
    assert not driven.events("worker lost: engine died")
    retried = [e for e in driven.events("assigned") if not str(e["attempt"]).startswith("0")]
    assert not retried, "a lost node must charge nobody"
    assert set(statuses(config).values()) == {("stored", None)}
