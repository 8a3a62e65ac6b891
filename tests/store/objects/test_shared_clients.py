"""Stores that are made alike share a client; whatever differs gets its own."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from obstore import store as obstores

from store.errors import ObjectNotFound
from store.objects import shared_clients
from store.objects.open import open_store
from tests.store.s3_servers import S3Server

pytestmark = pytest.mark.s3


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of the clients that are really made from here on."""
    monkeypatch.setattr(shared_clients, "_kept", type(shared_clients._kept)())
    addresses: list[str] = []
    make = obstores.from_url

    def counted(address: str, **settings: Any) -> Any:
        addresses.append(address)
        return make(address, **settings)

    monkeypatch.setattr(obstores, "from_url", counted)
    return addresses


def _use(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ObjectNotFound):
        open_store(url, options).size("nothing")


def test_stores_made_alike_share_a_client(moto_server: S3Server, made: list[str]) -> None:
    url, options = moto_server.url("shared"), moto_server.options
    for _ in range(3):
        _use(url, dict(options))
    store = open_store(url, options)
    with pytest.raises(ObjectNotFound):
        pickle.loads(pickle.dumps(store)).size("nothing")
    assert made == [url]


def test_whatever_differs_gets_a_client_of_its_own(
    moto_server: S3Server, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = moto_server.url("apart"), dict(moto_server.options)
    _use(url, options)
    _use(moto_server.url("elsewhere"), options)
    _use(url, {**options, "timeout": 9})
    _use(url, {**options, "client_options": {"user_agent": "someone"}})
    monkeypatch.setenv("AWS_REQUEST_PAYER", "true")
    _use(url, options)
    assert len(made) == 5
    monkeypatch.setattr(os, "getpid", lambda: -1)
    _use(url, options)
    assert len(made) == 6
    _use(url, options)
    assert len(made) == 6


def test_only_so_many_are_kept(
    moto_server: S3Server, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_clients, "MOST_KEPT", 2)
    urls = [moto_server.url(f"kept{number}") for number in range(3)]
    for url in [*urls, urls[2], urls[1], urls[0]]:
        _use(url, moto_server.options)
    assert made == [*urls, urls[0]]
