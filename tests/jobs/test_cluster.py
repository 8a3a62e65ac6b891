"""Several Ray nodes on one machine, submitted jobs, an object store that goes away: all real."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from jobs.config_file import load_config
from jobs.metrics import GAUGES, STAGES
from jobs.submit import Submitted, submit
from tests.jobs.run_process import SLOW, RunProcess, assert_complete, texts
from tests.store.s3_servers import S3Server, free_ports, seaweedfs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

Configs = Callable[..., Path]
TEXTS = texts(150)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head that runs no worker, and two nodes with room for one each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [made.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
        yield made, nodes
    finally:
        made.shutdown()


@pytest.mark.chaos
def test_a_killed_node_costs_its_units_nothing_and_the_other_node_goes_on(
    cluster: Any, engine_config: Configs, tmp_path: Path
) -> None:
    made, nodes = cluster
    config = engine_config(
        TEXTS * 20, capture={"unit_tokens": 512},
        engine=SLOW,
        workers={"address": made.address, "min": 1, "max": 2, "num_cpus": 1},
    )  # fmt: skip
    with RunProcess(config) as run:
        started = run.wait_for("worker started", 2)
        assert len({event["node"] for event in started}) == 2
        run.wait_for("committed", 2)
        made.remove_node(nodes[0], allow_graceful=False)
        lost = run.wait_for("worker lost: node lost")
        assert lost[0]["worker"] in (0, 1)
        assert run.finish() == 0, run.transcript()
        retried = [event for event in run.named("assigned") if not event["attempt"].startswith("0")]
        assert not retried, "a lost node must charge nobody"
    assert_complete(tmp_path / "run")


@pytest.mark.s3
def test_an_object_store_that_restarts_in_the_middle_costs_no_prompt(
    engine_config: Configs,
) -> None:
    with seaweedfs() as server:
        config = engine_config(
            TEXTS * 2, engine=SLOW, output=server.url("restart"), storage_options=server.options,
            capture={"unit_tokens": 128}, workers={"store_patience_seconds": 120},
        )  # fmt: skip
        with RunProcess(config) as run:
            run.wait_for("committed", 2)
            revived = _restart(server, pause=8.0)
            try:
                assert run.finish() == 0, run.transcript()
                assert not run.named("unit failed")
                assert_complete(server.url("restart"), options=server.options)
            finally:
                revived.kill()
                revived.wait(10)


@pytest.mark.chaos
@pytest.mark.s3
def test_credentials_are_stored_nowhere(engine_config: Configs) -> None:
    with seaweedfs() as server:
        config = engine_config(
            TEXTS[:4], output=server.url("secrets"), storage_options=server.options
        )
        secret = yaml.safe_load(config.read_text())["storage_options"]["secret_access_key"]
        with RunProcess(config) as run:
            assert run.finish() == 0, run.transcript()
            assert secret not in run.transcript()
        from store.objects.open import open_store

        objects = open_store(server.url("secrets"), server.options)
        names = [info.name for info in objects.list("") if info.name.endswith(".json")]
        assert "run.json" in names
        for name in names:
            assert secret.encode() not in objects.get(name, max_bytes=1 << 24), name


def _restart(server: S3Server, pause: float) -> subprocess.Popen[bytes]:
    """Kill the server, leave it dead for a while, and start it again over the same folder."""
    port = server.endpoint.rsplit(":", 1)[1]
    process = next(
        one
        for one in psutil.process_iter(["cmdline"])
        if f"-s3.port={port}" in (one.info["cmdline"] or [])
    )
    command, folder = process.cmdline(), process.cwd()
    os.kill(process.pid, signal.SIGKILL)
    time.sleep(pause)
    log = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """A cluster of one node that takes jobs: its dashboard's and its metrics' address."""
    from ray.cluster_utils import Cluster

    # Jobs run `python`, as a cluster's image has it: here that is the tests' own.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    port, metrics = free_ports(2)
    head = {
        "num_cpus": 2, "include_dashboard": True, "dashboard_port": port,
        "metrics_export_port": metrics, "_system_config": {"metrics_report_interval_ms": 500},
    }  # fmt: skip
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield f"http://{made.webui_url}", f"http://{made.head_node.node_ip_address}:{metrics}"
    finally:
        made.shutdown()


@pytest.mark.chaos
def test_submitting_twice_finds_the_job_at_work_and_later_resumes_under_a_new_id(
    dashboard: tuple[str, str], engine_config: Configs, tmp_path: Path
) -> None:
    from ray.job_submission import JobStatus, JobSubmissionClient

    address, metrics = dashboard
    config = load_config(engine_config(TEXTS * 4, capture={"unit_tokens": 128}))
    first = submit(config, address)
    assert first.created
    assert submit(config, address) == Submitted(first.submission_id, created=False)
    client = JobSubmissionClient(address)
    exported: set[str] = set()

    def ended(submission_id: str) -> JobStatus:
        deadline = time.monotonic() + 150
        while not (status := client.get_job_status(submission_id)).is_terminal():
            assert time.monotonic() < deadline, client.get_job_logs(submission_id)
            with urllib.request.urlopen(f"{metrics}/metrics", timeout=10) as answer:
                exported.update(re.findall(r"ray_attnstore_(\w+)\{", answer.read().decode()))
            time.sleep(0.5)
        return status

    logs = client.get_job_logs
    assert ended(first.submission_id) is JobStatus.SUCCEEDED, logs(first.submission_id)
    assert_complete(tmp_path / "run")
    assert {metric.name for metric in (*GAUGES, STAGES)} <= exported
    second = submit(config, address)
    assert second.created
    assert second.submission_id != first.submission_id
    assert ended(second.submission_id) is JobStatus.SUCCEEDED
    assert "nothing to do" in logs(second.submission_id)
