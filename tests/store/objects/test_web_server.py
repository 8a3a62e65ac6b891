"""A run behind any static web server can be read, from its latest snapshot."""

from __future__ import annotations

import functools
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from store import open_run
from store.errors import CannotList, ObjectNotFound, StoreError
from store.objects.local import LocalStore
from store.objects.open import open_store
from store.plan import read_segments
from store.snapshot import find_committed, write_snapshot
from tests.store.sample_run import RUN_ID, SampleShape, write_run
from tests.store.served import served


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def web(tmp_path):
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with served(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as authority:
        yield f"http://{authority}/run"


def test_a_run_is_read_over_http(tmp_path, web):
    objects = LocalStore(tmp_path / "run")
    samples = write_run(objects, SampleShape(), [[30, 0, 7], [9]])
    remote = open_store(web)
    with pytest.raises(CannotList, match="no snapshot"):
        find_committed(remote, RUN_ID)
    write_snapshot(objects, RUN_ID)
    assert find_committed(remote, RUN_ID).units().tolist() == [0, 1]
    assert read_segments(remote) == read_segments(objects)
    with pytest.raises(ObjectNotFound):
        remote.get("absent.json", max_bytes=10)
    run = open_run(web)
    z = run.read("z", prompt="p2", layer=1)
    assert np.array_equal(z.values, samples[0].arrays["z"][1, 30:37].swapaxes(0, 1))


def test_a_web_server_is_never_written(web):
    remote = open_store(web)
    for write in (
        lambda: remote.put("a", [b"x"]),
        lambda: remote.create("a", b"x"),
        lambda: remote.delete("a"),
    ):
        with pytest.raises(StoreError, match="only be read"):
            write()
