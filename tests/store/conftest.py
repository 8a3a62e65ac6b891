"""Object stores of every kind for the store's tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.objects.fsspec_store import FsspecStore
from store.objects.local import LocalStore
from store.objects.obstore_store import ObstoreStore
from store.objects.protocol import ObjectStore
from tests.store.s3_servers import S3Server, moto, seaweedfs

STORE_KINDS = ["local", "memory", "fsspec", "moto", pytest.param("seaweedfs", marks=pytest.mark.s3)]


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[S3Server]:
    """A real S3 server, started once."""
    with seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """moto's S3 server, started once."""
    with moto() as server:
        yield server


@pytest.fixture(params=STORE_KINDS)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind in turn."""
    folder = f"folder/run-{secrets.token_hex(4)}"
    if request.param == "local":
        return LocalStore(tmp_path / "run")
    if request.param == "memory":
        return ObstoreStore(f"memory://{folder}")
    if request.param == "fsspec":
        return FsspecStore(f"memory://{folder}")
    server: S3Server = request.getfixturevalue(f"{request.param}_server")
    return ObstoreStore(server.url(folder), server.options)
