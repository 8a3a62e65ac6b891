"""From URL to back end, and the probe that refuses one where two writers can win."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from obstore import store as obstores

from store.errors import ObjectExists, StoreError, StoreNotAtomic
from store.objects import obstore_store
from store.objects.fsspec_store import FsspecStore
from store.objects.local import LocalStore
from store.objects.obstore_store import ObstoreStore
from store.objects.open import open_store
from store.objects.probe import probe_create_only
from tests.store.served import served


def test_urls_find_their_back_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert isinstance(open_store(tmp_path), LocalStore)
    assert open_store("~/run").url == str(tmp_path / "run")
    assert open_store("file:///data/my%20run").url == "/data/my run"
    for url in ("s3://b/run", "gs://b/run", "az://c/run", "https://host/run", "memory://run"):
        assert isinstance(open_store(url), ObstoreStore)
        assert open_store(url).url == url
    for url in ("hf://datasets/x/y", "simplecache::s3://b/run", "sftp://host/run"):
        assert isinstance(open_store(url), FsspecStore)


def test_a_url_that_nobody_serves(tmp_path):
    with pytest.raises(StoreError, match="no back end for gopher"):
        open_store("gopher://host/run").get("run.json", max_bytes=10)


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/exp#2", "s3://b/exp?x=1", "gs://b/exp?", "memory://x#1", "file:///data/run#2",
        "file:///data/run?x", "s3://b/a/../c", "s3://b/./c", "s3://b/%2e%2e/c", "s3://b/a%2Fb",
        "file:///data/a%2Fb", "file://data/run", "https://host/run#2", "https://host/a/../run?k=v",
    ],
)  # fmt: skip
def test_a_url_that_would_mean_another_run_is_refused(url):
    with pytest.raises(StoreError, match="would") as caught:
        open_store(url)
    assert "k=v" not in str(caught.value)


def test_characters_that_are_honoured(tmp_path):
    for name in ("run#1", "a?b", "a%20b"):
        assert open_store(str(tmp_path / name)).url == str(tmp_path / name)
    assert open_store("file:///data/run%232").url == "/data/run#2"
    for url in ("memory://x/run%231", "memory://x/run"):
        open_store(url).put("x", [url.encode()])
    assert open_store("memory://x/run").get("x", max_bytes=99) == b"memory://x/run"


def test_a_web_servers_query_is_sent_with_every_request():
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "1")
            self.end_headers()
            self.wfile.write(b"1")

        def log_message(self, *_: object) -> None:
            pass

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Answers)) as host:
        open_store(f"http://{host}/run?sig=a%2Fb", {"attempts": 1}).get("run.json", max_bytes=9)
    assert asked == ["/run/run.json?sig=a%2Fb"]


def test_memory_is_one_place_per_url():
    open_store("memory://shared/run").put("x", [b"x"])
    assert open_store("memory://shared/run").get("x", max_bytes=1) == b"x"
    assert list(open_store("memory://other/run").list("")) == []


def test_fsspec_file_systems_are_read_only_unless_known_atomic(tmp_path):
    (tmp_path / "run.json").write_bytes(b"{}")
    objects = FsspecStore(f"file://{tmp_path}")
    assert objects.get("run.json", max_bytes=10) == b"{}"
    for write in (
        lambda: objects.put("x", [b"x"]),
        lambda: objects.create("x", b"x"),
        lambda: objects.delete("run.json"),
    ):
        with pytest.raises(StoreError, match="can only be read"):
            write()


def test_settings_come_from_the_environment_too(monkeypatch):
    from tests.store.fault_server import fault_server

    with fault_server() as server:
        server.accepted_keys = {"from-environment"}
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-environment")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        open_store(server.url).put("x", [b"x"])
        assert server.objects == {"x": b"x"}


KEYS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
PLAIN, TLS = "http://127.0.0.1:9", "https://127.0.0.1:9"


def asked_of_obstore(options, monkeypatch):
    """Return what obstore is asked to make of these options."""
    made = {}

    def from_url(url, **arguments):
        made.update(arguments)
        raise ValueError("far enough")

    monkeypatch.setattr(obstores, "from_url", from_url)
    with pytest.raises(StoreError, match="far enough"):
        open_store("s3://bucket/run", options).size("x")
    return made


@pytest.mark.parametrize(
    ("options", "unsigned"),
    [
        (KEYS, True),
        ({"endpoint": TLS, **KEYS}, True),
        ({"endpoint": PLAIN, **KEYS}, False),
        ({"endpoint": TLS, "unsigned_payload": False, **KEYS}, False),
    ],
)
def test_payloads_go_unsigned_where_tls_guards_them(options, unsigned, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert asked_of_obstore(options, monkeypatch)["config"]["unsigned_payload"] is unsigned


def test_a_listing_goes_on_while_pages_are_full(objects, monkeypatch):
    monkeypatch.setattr(obstore_store, "PAGE_OBJECTS", 2)
    names = [f"a/{i}" for i in range(5)]
    for name in names:
        objects.put(name, [b"x"])
    assert sorted(info.name for info in objects.list("a/")) == names
    assert sorted(info.name for info in objects.list("a/", after="a/1")) == names[2:]
    objects.delete("a/4")
    assert sorted(info.name for info in objects.list("a/")) == names[:4]


def test_a_listing_that_does_not_go_on_is_an_error(monkeypatch):
    objects = ObstoreStore("memory://no-offsets/run")
    for number in range(3):
        objects.put(f"commits/{number}", [b"x"])
    monkeypatch.setattr(obstore_store, "PAGE_OBJECTS", 3)
    list_all = obstore_store.obstore.list

    def without_offset(*of, offset, **more):
        return list_all(*of, **more)

    monkeypatch.setattr(obstore_store.obstore, "list", without_offset)
    listing = objects.list("commits/")
    assert [next(listing).name for _ in range(3)] == ["commits/0", "commits/1", "commits/2"]
    with pytest.raises(StoreError, match="does not go on after commits/2"):
        next(listing)


def test_a_short_listing_is_one_request(monkeypatch):
    objects, pages = ObstoreStore("memory://short/listing"), []
    monkeypatch.setattr(
        ObstoreStore,
        "_page",
        lambda self, *a, ask=ObstoreStore._page: pages.append(a) or ask(self, *a),
    )
    objects.put("a/b", [b"x"])
    assert [info.name for info in objects.list("a/")] == ["a/b"]
    assert len(pages) == 1


class LooksFirst(LocalStore):
    """Creates like fsspec's generic file systems: looks, then writes."""

    def create(self, name, data):
        if name in {info.name for info in self.list("checks/")}:
            raise ObjectExists(name)
        time.sleep(0.02)
        self.put(name, [bytes(data)])


class IgnoresTheCondition(LocalStore):
    """Creates like a server that does not know If-None-Match."""

    def create(self, name, data):
        self.put(name, [bytes(data)])


class NobodyWins(LocalStore):
    """Says that the name is taken to every racer."""

    def create(self, name, data):
        self.put(name, [bytes(data)])
        super().create(name, data)


@pytest.mark.parametrize("kind", [LooksFirst, IgnoresTheCondition, NobodyWins])
def test_the_probe_refuses_a_back_end_that_is_not_atomic(tmp_path, kind):
    objects = kind(tmp_path)
    before = threading.active_count()
    with pytest.raises(StoreNotAtomic, match="told"):
        probe_create_only(objects)
    assert list(objects.list("")) == []
    assert threading.active_count() < before + 20
