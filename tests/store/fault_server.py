"""A tiny S3 server that misbehaves by plan: 409, 503, lost answers, short bodies, stalls."""

from __future__ import annotations

import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.store.served import served

BUCKET = "faulty"


class Fault(Enum):
    """What happens to one request instead of a proper answer."""

    NONE = "nothing: a proper answer"
    CONFLICT = "409, without effect"
    UNAVAILABLE = "503, without effect"
    UNAVAILABLE_AFTER = "503, after the effect"
    DROPPED = "the connection closes, without effect"
    DROPPED_AFTER = "the connection closes, after the effect"
    TRUNCATED = "the body breaks off"
    STALLED = "no answer for longer than the time-out, without effect"
    DENIED = "403, without effect"
    NO_BUCKET = "404, of the bucket, without effect"


@dataclass
class FaultServer:
    """A running server. `faults` are used up by the next requests of their method."""

    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: list[tuple[str, Fault]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    """Multipart uploads that are not finished: id -> part number -> bytes."""
    accepted_keys: set[str] | None = None
    """Access keys that are let in; None lets everyone in."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/run"

    def options(self, **more: Any) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint,
            "access_key_id": "first",
            "secret_access_key": "secret",
            "region": "us-east-1",
            "timeout": 1.5,
            "attempts": 3,
            "retry_seconds": 20.0,
            **more,
        }

    def plan(self, method: str, *faults: Fault) -> None:
        self.faults.extend((method, fault) for fault in faults)


@contextmanager
def fault_server() -> Iterator[FaultServer]:
    """Run the server in a thread of this process."""
    state = FaultServer()

    class Handler(_Handler):
        server_state = state

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as authority:
        state.endpoint = f"http://{authority}"
        yield state


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: FaultServer

    def log_message(self, *args: object) -> None:
        pass

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._serve("PUT", lambda: self._put(body))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._serve("POST", self._begin_or_complete)

    def do_DELETE(self) -> None:
        self._serve("DELETE", self._delete)

    def do_GET(self) -> None:
        self._serve("GET", self._get)

    def do_HEAD(self) -> None:
        self._serve("HEAD", self._get)

    def _serve(self, method: str, act) -> None:
        state = self.server_state
        with state.lock:
            state.requests.append(f"{method} {self._name()}")
            fault = None
            if state.faults and state.faults[0][0] == method:
                fault = state.faults.pop(0)[1]
        if state.accepted_keys is not None and self._access_key() not in state.accepted_keys:
            return self._answer(403, b"<Error><Code>ExpiredToken</Code></Error>")
        if fault is Fault.STALLED:
            time.sleep(2.5)
            self.close_connection = True
            return None
        if fault is Fault.DROPPED:
            self.close_connection = True
            return None
        codes = {
            Fault.CONFLICT: 409, Fault.UNAVAILABLE: 503, Fault.DENIED: 403, Fault.NO_BUCKET: 404,
        }  # fmt: skip
        if fault in codes:
            return self._answer(codes[fault], b"<Error><Code>Injected</Code></Error>")
        status, data, headers = act()
        if fault is Fault.UNAVAILABLE_AFTER:
            return self._answer(503, b"<Error><Code>Injected</Code></Error>")
        if fault is Fault.DROPPED_AFTER:
            self.close_connection = True
            return None
        self._answer(status, data, headers, truncate=fault is Fault.TRUNCATED)
        return None

    def _put(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        state = self.server_state
        upload, part = self._query("uploadId"), self._query("partNumber")
        if upload and part:
            with state.lock:
                state.uploads[upload][int(part)] = body
            return 200, b"", {"ETag": f'"{part}"'}
        with state.lock:
            conditional = (
                self.headers.get("If-None-Match") == "*"
                or self.headers.get("x-goog-if-generation-match") == "0"
            )
            if conditional and self._name() in state.objects:
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
            state.objects[self._name()] = body
        return 200, b"", {"ETag": f'"{hash(body) & 0xFFFFFFFF:08x}"'}

    def _begin_or_complete(self) -> tuple[int, bytes, dict[str, str]]:
        state, upload = self.server_state, self._query("uploadId")
        with state.lock:
            if upload is None:
                upload = f"upload-{len(state.requests)}"
                state.uploads[upload] = {}
                return 200, _xml("InitiateMultipartUploadResult", UploadId=upload), {}
            if upload not in state.uploads:
                return 404, b"<Error><Code>NoSuchUpload</Code></Error>", {}
            parts = state.uploads.pop(upload)
            state.objects[self._name()] = b"".join(parts[number] for number in sorted(parts))
        return 200, _xml("CompleteMultipartUploadResult", ETag='"e"'), {}

    def _delete(self) -> tuple[int, bytes, dict[str, str]]:
        with self.server_state.lock:
            self.server_state.objects.pop(self._name(), None)
        return 204, b"", {}

    def _get(self) -> tuple[int, bytes, dict[str, str]]:
        data = self.server_state.objects.get(self._name())
        if data is None:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        headers = {"ETag": '"e"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        wanted = self.headers.get("Range")
        if wanted is None:
            return 200, data, headers
        first, last = wanted.removeprefix("bytes=").split("-")
        start, end = int(first), min(int(last) + 1, len(data))
        if start >= len(data):
            return 416, b"<Error><Code>InvalidRange</Code></Error>", {}
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return 206, data[start:end], headers

    def _answer(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        truncate: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if truncate else data)
        if truncate:
            self.close_connection = True

    def _name(self) -> str:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        return path.removeprefix(f"/{BUCKET}/run/")

    def _query(self, name: str) -> str | None:
        query = urllib.parse.urlsplit(self.path).query
        return urllib.parse.parse_qs(query, keep_blank_values=True).get(name, [None])[0]

    def _access_key(self) -> str:
        return self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]


def _xml(root: str, **members: str) -> bytes:
    body = "".join(f"<{name}>{value}</{name}>" for name, value in members.items())
    return f"<{root}>{body}</{root}>".encode()
