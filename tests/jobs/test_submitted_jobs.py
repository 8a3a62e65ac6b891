"""Runs submitted to a real Ray as jobs: found at work, killed, stopped, and gone on with."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs.config_file import load_config
from jobs.metrics import GAUGES, STAGES
from jobs.submit import CONFIG_NAME, Submitted, submit
from store.commit import committed_units, read_commit
from store.objects.open import open_store
from tests.jobs.run_process import SLOW, assert_complete, texts
from tests.store.s3_servers import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(1800)]

Configs = Callable[..., Path]
DEADLINE_SECONDS = 600.0


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


def test_submitting_twice_finds_the_job_at_work_and_later_resumes_under_a_new_id(
    dashboard: tuple[str, str], engine_config: Configs, tmp_path: Path
) -> None:
    from ray.job_submission import JobStatus, JobSubmissionClient

    address, metrics = dashboard
    config = load_config(engine_config(texts(600), capture={"unit_tokens": 128}))
    first = submit(config, address)
    assert first.created
    assert submit(config, address) == Submitted(first.submission_id, created=False)
    client = JobSubmissionClient(address)
    exported: set[str] = set()

    def ended(submission_id: str) -> JobStatus:
        deadline = time.monotonic() + DEADLINE_SECONDS
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


def test_a_job_that_is_killed_and_one_that_is_stopped_are_gone_on_with_by_submitting_again(
    dashboard: tuple[str, str], engine_config: Configs, tmp_path: Path
) -> None:
    from ray.job_submission import JobStatus, JobSubmissionClient

    address, _ = dashboard
    client = JobSubmissionClient(address)
    config = load_config(engine_config(texts(3000), engine=SLOW))
    objects = open_store(str(tmp_path / "run"))

    def attempts() -> dict[int, str]:
        return {
            unit: read_commit(objects, at).attempt for unit, at in committed_units(objects).items()
        }

    def struck(job: Submitted, more_than: int, strike: Callable[[], Any]) -> dict[int, str]:
        """Strike once the job has committed; return what was committed by then."""
        _wait(lambda: len(committed_units(objects)) > more_than, client, job)
        assert submit(config, address) == Submitted(job.submission_id, created=False)
        before = attempts()
        assert client.get_job_status(job.submission_id) is JobStatus.RUNNING
        strike()
        _wait(lambda: client.get_job_status(job.submission_id).is_terminal(), client, job)
        return before

    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda _: submit(config, address), range(4)))
    assert sorted(one.created for one in at_once) == [False, False, False, True]
    (first,) = {one.submission_id: one for one in at_once}.values()
    kept = struck(first, 1, _kill_driver)
    assert client.get_job_status(first.submission_id) is JobStatus.FAILED

    second = submit(config, address)
    assert second.created
    kept |= struck(second, len(attempts()) + 1, lambda: client.stop_job(second.submission_id))
    assert client.get_job_status(second.submission_id) is JobStatus.STOPPED

    last = submit(config, address)
    assert last.created
    assert len({first.submission_id, second.submission_id, last.submission_id}) == 3
    _wait(lambda: client.get_job_status(last.submission_id).is_terminal(), client, last)
    logs = client.get_job_logs(last.submission_id)
    assert client.get_job_status(last.submission_id) is JobStatus.SUCCEEDED, logs
    found = attempts()
    assert len(found) > len(kept), "nothing was left for the last job"
    assert {unit: found[unit] for unit in kept} == kept, "what was committed is not captured again"
    assert_complete(tmp_path / "run")


def _wait(until: Callable[[], bool], client: Any, job: Submitted) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not until():
        assert time.monotonic() < deadline, client.get_job_logs(job.submission_id)
        time.sleep(0.2)


def _kill_driver() -> None:
    """SIGKILL the job's driver: what its entrypoint started, in the folder of the job's code."""
    drivers = [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"jobs.cli", CONFIG_NAME} <= set(process.info["cmdline"] or [])
    ]
    assert drivers
    for process in drivers:
        os.kill(process.pid, signal.SIGKILL)
