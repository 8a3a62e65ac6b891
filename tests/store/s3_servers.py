"""S3 servers on loopback for the tests: a real one (seaweedfs) and moto's imitation."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY, SECRET = "testkey", "testsecret"
START_SECONDS = 60.0


@dataclass(frozen=True)
class S3Server:
    """A running server: `options` are what `open_store` takes."""

    endpoint: str
    bucket: str
    options: dict[str, Any] = field(default_factory=dict)

    def url(self, folder: str) -> str:
        return f"s3://{self.bucket}/{folder}"

    def process(self) -> Any:
        """The process of a seaweedfs, as psutil has it."""
        import psutil

        port = f"-s3.port={self.endpoint.rsplit(':', 1)[1]}"
        running = psutil.process_iter(["cmdline"])
        return next(one for one in running if port in (one.info["cmdline"] or []))

    def accept(self, *keys: str, not_: str) -> None:
        """Let a seaweedfs take these access keys alone from now on, all with the same secret.

        Returns once it takes them all and refuses `not_`.
        """
        process = self.process()
        option = next(one for one in process.cmdline() if one.startswith("-s3.config="))
        config = Path(option.partition("=")[2])
        config.write_text(json.dumps({"identities": [_identity(*keys)]}))
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + START_SECONDS
        while not all(map(self._takes, keys)) or self._takes(not_):
            assert time.monotonic() < deadline, f"the server does not go by {config}"
            time.sleep(0.1)

    def _takes(self, key: str) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            _client(self.endpoint, key).head_object(Bucket=self.bucket, Key="ready")
        except (BotoCoreError, ClientError):
            return False
        return True


def free_ports(count: int) -> list[int]:
    """Return distinct free ports on loopback."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def seaweedfs() -> Iterator[S3Server]:
    """Run a seaweedfs server in a temporary folder; end it and remove the folder afterwards."""
    weed = Path(sys.executable).with_name("weed")
    folder = Path(tempfile.mkdtemp(prefix="attnstore-weed-"))
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [_identity(KEY)]}))
    parts = ("master.port", "volume.port", "filer.port", "s3.port")
    names = [*parts, *(f"{part}.grpc" for part in parts)]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [
        os.fspath(weed), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-filer", "-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=100",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            yield _with_bucket(f"http://127.0.0.1:{ports['s3.port']}", process)
        finally:
            _end(process)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def moto() -> Iterator[S3Server]:
    """Run moto's server in a process of its own; end it afterwards."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield _with_bucket(f"http://127.0.0.1:{port}", process)
    finally:
        _end(process)


def _identity(*keys: str) -> dict[str, Any]:
    return {
        "name": "tests",
        "credentials": [{"accessKey": key, "secretKey": SECRET} for key in keys],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }


def _client(endpoint: str, key: str) -> Any:
    import boto3

    return boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id=key, aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )  # fmt: skip


def _with_bucket(endpoint: str, process: subprocess.Popen[bytes]) -> S3Server:
    from botocore.exceptions import BotoCoreError, ClientError

    client = _client(endpoint, KEY)
    bucket = "attnstore-tests"
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(endpoint, timeout=2).close()
        except urllib.error.HTTPError:
            break
        except OSError:
            _wait(process, deadline)
        else:
            break
    while True:
        try:
            client.create_bucket(Bucket=bucket)
            client.put_object(Bucket=bucket, Key="ready", Body=b"ready")
            break
        except (BotoCoreError, ClientError):
            _wait(process, deadline)
    options = {
        "endpoint": endpoint, "access_key_id": KEY, "secret_access_key": SECRET,
        "region": "us-east-1", "attempts": 3, "retry_seconds": 20.0,
    }  # fmt: skip
    return S3Server(endpoint, bucket, options)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    if process.poll() is not None:
        raise RuntimeError(f"the S3 server ended with code {process.returncode} while starting")
    if time.monotonic() > deadline:
        raise TimeoutError(f"the S3 server did not start in {START_SECONDS} s")
    time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)
