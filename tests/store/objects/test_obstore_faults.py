"""What a network and a service can do to a request, and what the caller sees of it."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from store import keys
from store.commit import commit_unit, read_commit
from store.errors import (
    DamagedObject,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreRefused,
    is_store_trouble,
)
from store.objects.obstore_store import MULTIPART_BYTES, ObstoreStore
from store.objects.protocol import ByteRange
from tests.store.fault_server import Fault, fault_server
from tests.store.test_snapshot import small_commit

EFFECTLESS = [Fault.UNAVAILABLE, Fault.DROPPED, Fault.STALLED]
EFFECTIVE = [Fault.UNAVAILABLE_AFTER, Fault.DROPPED_AFTER]


@pytest.fixture
def server():
    with fault_server() as running:
        yield running


@pytest.fixture
def objects(server):
    return ObstoreStore(server.url, server.options())


@pytest.mark.parametrize("fault", EFFECTLESS + EFFECTIVE)
def test_a_put_is_repeated(server, objects, fault):
    server.plan("PUT", fault)
    objects.put("a", [b"one", b"two"])
    assert server.objects == {"a": b"onetwo"}


@pytest.mark.parametrize("fault", [*EFFECTLESS, Fault.TRUNCATED])
def test_reads_are_repeated_and_never_short(server, objects, fault):
    server.objects["a"] = b"0123456789" * 1000
    server.plan("GET", fault)
    assert objects.get("a", max_bytes=10_000) == server.objects["a"]
    server.plan("GET", fault)
    wanted = [ByteRange(0, 5000), ByteRange(9000, 1000)]
    assert [len(piece) for piece in objects.get_ranges("a", wanted)] == [5000, 1000]


def test_a_short_object_is_damage_and_not_tried_again(server, objects):
    server.objects["a"] = b"0123456789"
    begun = time.monotonic()
    with pytest.raises(DamagedObject, match="10 bytes"):
        objects.get_ranges("a", [ByteRange(5, 10)])
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("fault", EFFECTLESS)
def test_a_create_is_repeated_while_it_had_no_effect(server, objects, fault):
    server.plan("PUT", fault)
    objects.create("a", b"one")
    assert server.objects == {"a": b"one"}


def test_a_conflict_nobody_won_is_tried_again(server, objects):
    server.plan("PUT", Fault.CONFLICT)
    objects.create("a", b"one")
    assert server.objects == {"a": b"one"}


def test_a_conflict_somebody_won_is_object_exists(server, objects):
    server.objects["a"] = b"theirs"
    server.plan("PUT", Fault.CONFLICT)
    with pytest.raises(ObjectExists):
        objects.create("a", b"ours")
    assert server.objects == {"a": b"theirs"}


@pytest.mark.parametrize("fault", [*EFFECTLESS, *EFFECTIVE, Fault.CONFLICT])
def test_a_commit_wins_against_its_own_lost_answer(server, objects, fault, monkeypatch):
    monkeypatch.setattr(objects, "list", lambda prefix, after="": iter(()))
    server.plan("PUT", fault)
    commit = small_commit(3)
    assert commit_unit(objects, commit).won
    assert read_commit(objects, keys.commit_key(3)) == commit
    other = commit.model_copy(update={"attempt": "other"})
    server.plan("PUT", fault)
    result = commit_unit(objects, other)
    assert (result.won, result.attempt) == (False, "a0")


def test_trouble_that_lasts_is_reported_within_bounds(server, objects):
    server.plan("PUT", *[Fault.UNAVAILABLE] * 50)
    begun = time.monotonic()
    with pytest.raises(StoreError, match="503"):
        objects.put("a", [b"x"])
    assert time.monotonic() - begun < 20
    assert server.objects == {}


def test_no_permission_is_said_at_once_and_without_secrets(server, objects):
    server.plan("GET", Fault.DENIED)
    with pytest.raises(StoreError, match="not allowed") as caught:
        objects.get("a", max_bytes=1)
    assert len(server.requests) == 1
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "said", "use"),
    [
        ("PUT", "no such bucket", lambda objects: objects.put("a", [b"x"])),
        ("PUT", "no such bucket", lambda objects: objects.create("a", b"x")),
        ("POST", "404", lambda objects: objects.put("a", [bytes(MULTIPART_BYTES + 1)])),
        ("GET", "404", lambda objects: list(objects.list("data/"))),
    ],
)
def test_a_bucket_that_is_gone_is_no_missing_object(server, objects, method, said, use):
    server.plan(method, *[Fault.NO_BUCKET] * 9)
    with pytest.raises(StoreError, match=said) as caught:
        use(objects)
    assert isinstance(caught.value, StoreRefused) is (method == "PUT")
    assert is_store_trouble(caught.value)
    assert not isinstance(caught.value, ObjectNotFound)


def test_credentials_that_expire_in_mid_run_are_renewed(server):
    handed_out = []

    def provider():
        handed_out.append(f"key-{len(handed_out)}")
        return {
            "access_key_id": handed_out[-1],
            "secret_access_key": "secret",
            "token": None,
            "expires_at": datetime.now(UTC) + timedelta(seconds=1),
        }

    options = server.options(credential_provider=provider)
    del options["access_key_id"], options["secret_access_key"]
    objects = ObstoreStore(server.url, options)
    for number in range(3):
        server.accepted_keys = {f"key-{i}" for i in range(number, 20)}
        objects.put(f"o{number}", [b"x"])
        time.sleep(1.1)
    assert len(server.objects) == 3
    assert len(set(handed_out)) >= 3


def test_a_profile_gives_credentials_by_name(server, tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text(
        "[work]\naws_access_key_id = from-profile\naws_secret_access_key = secret\n"
    )
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    server.accepted_keys = {"from-profile"}
    options = server.options(credential_provider="boto3")
    del options["access_key_id"], options["secret_access_key"]
    ObstoreStore(server.url, options).put("a", [b"x"])
    assert server.objects == {"a": b"x"}
    with pytest.raises(StoreError, match="boto3, google, azure"):
        ObstoreStore(server.url, options | {"credential_provider": "other"}).put("a", [b"x"])


def test_credentials_are_taken_to_last_no_longer_than_they_do(server, tmp_path, monkeypatch):
    """A program's keys are asked for again before they end, though it is boto3 that keeps them."""
    said = tmp_path / "keys.json"
    (tmp_path / "config").write_text(f"[profile short]\ncredential_process = cat {said}\n")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "short")
    options = server.options(credential_provider="boto3")
    del options["access_key_id"], options["secret_access_key"]
    objects = ObstoreStore(server.url, options)
    for number in range(3):
        ends = datetime.now(UTC) + timedelta(minutes=4)
        keys = {"AccessKeyId": f"key-{number}", "SecretAccessKey": "secret"}
        said.write_text(json.dumps({"Version": 1, **keys, "Expiration": ends.isoformat()}))
        server.accepted_keys = {f"key-{number}"}
        objects.put(f"o{number}", [b"x"])
        time.sleep(0.2)  # obstore asks at most ten times a second
    assert len(server.objects) == 3


def test_a_store_travels_to_another_process_by_pickle(server, objects):
    import pickle

    objects.put("a", [b"x"])
    assert pickle.loads(pickle.dumps(objects)).get("a", max_bytes=1) == b"x"


def test_the_url_never_shows_credentials():
    store = ObstoreStore("s3://user:password@bucket/run?token=abc", {"secret_access_key": "s"})
    assert store.url == "s3://bucket/run"


@pytest.mark.parametrize("fault", [None, *EFFECTLESS, *EFFECTIVE])
@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_big_put_survives_a_fault_in_any_of_its_requests(server, objects, method, fault):
    block = np.random.default_rng(0).bytes(1 << 20)
    parts = [memoryview(block)[:300_001], memoryview(block)[300_001:]] * 33
    for place in range({"PUT": 3, "POST": 2}[method]):
        server.objects.clear()
        server.plan(method, *[Fault.NONE] * place, *([] if fault is None else [fault]))
        objects.put("big", parts)
        assert server.objects == {"big": block * 33}
        assert server.faults == []


def _google(server) -> ObstoreStore:
    options = {
        "base_url": server.endpoint,
        "credential_provider": lambda: {"token": "t", "expires_at": None},
    }
    return ObstoreStore("gs://faulty/run", options | NO_TLS)


def _azure(server) -> ObstoreStore:
    options = {"endpoint": server.endpoint, "account_name": "account", "skip_signature": True}
    return ObstoreStore("az://faulty/run", options | NO_TLS)


NO_TLS = {"client_options": {"allow_http": True}, "attempts": 3, "timeout": 1.5}


@pytest.mark.parametrize("fault", [None, Fault.UNAVAILABLE, Fault.DROPPED_AFTER])
@pytest.mark.parametrize("service", [_google, _azure])
def test_other_clouds_create_on_condition_too(server, service, fault, monkeypatch):
    objects = service(server)
    monkeypatch.setattr(objects, "list", lambda prefix, after="": iter(()))
    if fault is not None:
        server.plan("PUT", fault)
    commit = small_commit(3)
    assert commit_unit(objects, commit).won
    assert not commit_unit(objects, commit.model_copy(update={"attempt": "other"})).won
    assert read_commit(objects, keys.commit_key(3)) == commit
    objects.put("data/x", [b"0123456789"])
    assert objects.size("data/x") == 10
    assert objects.get_ranges("data/x", [ByteRange(2, 3)]) == [b"234"]
    with pytest.raises(ObjectExists):
        objects.create("data/x", b"")
