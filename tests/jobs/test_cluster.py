"""Several Ray nodes on one machine, an object store that goes away, keys that expire: all real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from store.errors import StoreError
from store.objects.open import open_store
from tests.jobs.run_process import SLOW, RunProcess, assert_complete, texts
from tests.store.s3_servers import KEY, SECRET, S3Server, seaweedfs

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
        assert_complete(server.url("secrets"), options=server.options)
        objects = open_store(server.url("secrets"), server.options)
        names = [info.name for info in objects.list("") if info.name.endswith(".json")]
        assert "run.json" in names
        for name in names:
            assert secret.encode() not in objects.get(name, max_bytes=1 << 24), name


class HandedOutKeys:
    """What a program prints for the AWS SDK: keys that expire before long, others each time."""

    def __init__(self, folder: Path) -> None:
        self._said = folder / "keys.json"
        program = folder / "aws-config"
        program.write_text(f"[profile rotated]\ncredential_process = cat {self._said}\n")
        self.environment = {"AWS_PROFILE": "rotated", "AWS_CONFIG_FILE": str(program)}

    def hand_out(self, name: str) -> None:
        until = datetime.now(UTC) + timedelta(minutes=4)
        body = {
            "Version": 1, "AccessKeyId": name, "SecretAccessKey": SECRET,
            "Expiration": until.isoformat(),
        }  # fmt: skip
        self._said.with_suffix(".new").write_text(json.dumps(body))
        self._said.with_suffix(".new").replace(self._said)


@pytest.mark.chaos
@pytest.mark.s3
def test_credentials_that_expire_in_the_middle_are_renewed(
    engine_config: Configs, tmp_path: Path
) -> None:
    """The keys change twice; each time the server refuses the old ones once the new are there."""
    with seaweedfs() as server:
        own = {"access_key_id", "secret_access_key"}
        options = {name: value for name, value in server.options.items() if name not in own}
        server.accept("first", not_=KEY)
        keys = HandedOutKeys(tmp_path)
        keys.hand_out("first")
        config = engine_config(
            TEXTS * 10, engine=SLOW, output=server.url("rotated"),
            storage_options={**options, "credential_provider": "boto3"},
        )  # fmt: skip
        with RunProcess(config, **keys.environment) as run:
            for number, (old, new) in enumerate([("first", "second"), ("second", "third")], 1):
                run.wait_for("committed", 3 * number)
                server.accept(old, new, not_=KEY)
                keys.hand_out(new)
                server.accept(new, not_=old)
                assert run.process.poll() is None, "the run ended before its keys did"
            assert run.finish() == 0, run.transcript()
            assert not run.named("unit failed"), run.transcript()
        for name in ("first", "second"):
            expired = {**server.options, "access_key_id": name}
            with pytest.raises(StoreError, match="not allowed"):
                open_store(server.url("rotated"), expired).put("x", [b"x"])
        last = {**server.options, "access_key_id": "third"}
        assert_complete(server.url("rotated"), options=last)


def _restart(server: S3Server, pause: float) -> subprocess.Popen[bytes]:
    """Kill the server, leave it dead for a while, and start it again over the same folder."""
    process = server.process()
    command, folder = process.cmdline(), process.cwd()
    os.kill(process.pid, signal.SIGKILL)
    time.sleep(pause)
    log = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
