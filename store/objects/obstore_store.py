"""Objects in S3, Google Cloud Storage, Azure Blob Storage, over HTTP (read-only) or in memory.

Creates are conditional puts, decided by the service. A service may answer a create with "conflict"
although no writer won; that is looked at and tried again here. A create whose answer was lost may
surface as `ObjectExists` against itself, or as `StoreError`: the caller reads the object back and
compares, as `store.commit` does.

Objects above `MULTIPART_BYTES` go up in parts, so that a slow link never has to move a whole shard
within one request's time-out. Clients are made on first use in the process that uses them, and
shared by stores that are made alike (`store.objects.shared_clients`).

Reads follow redirects, writes do not, and obstore has no option that would change it. So a plain
HTTP endpoint may lead to a TLS one: the machine's certificates are loaded for every client (4 ms at
its first use), and no TLS connection is ever made that they, or `client_options`, do not vouch for.
From HTTPS no redirect leads to plain HTTP.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import obstore
from obstore import exceptions
from obstore import store as obstores
from typing_extensions import Buffer

from store.errors import (
    CannotList,
    DamagedObject,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreRefused,
)
from store.keys import checked_name
from store.objects.protocol import ByteRange, ObjectInfo
from store.objects.retry import DEFAULT_ATTEMPTS, DEFAULT_SECONDS, RetryPolicy, Transient
from store.objects.shared_clients import shared_client

SCHEMES = frozenset(
    {"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https", "memory"}
)
CREDENTIAL_PROVIDERS = {
    "boto3": ("store.objects.boto3_credentials", "Boto3Credentials"),
    "google": ("obstore.auth.google", "GoogleCredentialProvider"),
    "azure": ("obstore.auth.azure", "AzureCredentialProvider"),
}
MULTIPART_BYTES = 32 << 20
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
PAGE_OBJECTS = 1000
MAX_WHOLE_BYTES = 256 << 20
REQUEST_SECONDS = 120.0
CONNECT_SECONDS = 10.0
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_QUERY = re.compile(r"\?[^\s\"'),]*")

_memory: dict[str, obstores.MemoryStore] = {}
_memory_lock = threading.Lock()
T = TypeVar("T")


class ObstoreStore:
    """An `ObjectStore` over obstore. Thread-safe; picklable as its URL and options.

    Options: `timeout` and `connect_timeout` (seconds of one request), `attempts` and
    `retry_seconds` (see `RetryPolicy`), `client_options`, `credential_provider`; all others are the
    service's own settings by obstore's names (`endpoint`, `access_key_id`, `region`, ...). What is
    not given comes from the environment, as obstore reads it.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._address = url
        self._made_of = dict(options or {})
        self._options = dict(self._made_of)
        self._policy = RetryPolicy(
            attempts=int(self._options.pop("attempts", DEFAULT_ATTEMPTS)),
            seconds=float(self._options.pop("retry_seconds", DEFAULT_SECONDS)),
        )
        self._scheme = urlsplit(url).scheme
        self._client: Any = None
        self._process = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_process": 0, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        parts = urlsplit(self._address)
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, host, parts.path, "", ""))

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        """Send the parts as one object, a big one in several requests. May be repeated."""
        self._refuse_if_read_only()
        views = [memoryview(part).cast("B") for part in parts]
        total = sum(view.nbytes for view in views)
        if total > MULTIPART_BYTES:
            self._call(name, lambda client: self._put_in_parts(client, name, views), of_place=True)
            return
        whole = views[0] if len(views) == 1 else memoryview(b"".join(views))
        self._call(
            name,
            lambda client: obstore.put(client, checked_name(name), whole, use_multipart=False),
            of_place=True,
        )

    def create(self, name: str, data: Buffer) -> None:
        """Send a conditional put. `ObjectExists` may mean this very call's own first request."""
        self._refuse_if_read_only()
        whole = memoryview(data).cast("B")

        def conditional_put(client: Any) -> None:
            try:
                obstore.put(client, checked_name(name), whole, mode="create", use_multipart=False)
            except exceptions.AlreadyExistsError as error:
                taken = ObjectExists(f"{self.url}: {name} is already there")
                if self._exists(client, name):
                    raise taken from error
                # "Conflict" while writers race, and none of them has won: try again.
                conflict = StoreError(f"{self.url}: {name} is in conflict, but nobody wrote it")
                raise Transient from conflict

        self._call(name, conditional_put, of_place=True)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Return the whole object from one request, its size checked before its body is read."""

        def whole(client: Any) -> bytes:
            answer = obstore.get(client, checked_name(name))
            size = answer.meta["size"]
            if size > max_bytes:
                raise StoreRefused(f"{self.url}: {name} has {size} bytes, {max_bytes} are allowed")
            data = answer.bytes().to_bytes()
            if len(data) != size:
                short = StoreError(
                    f"{self.url}: {name} broke off after {len(data)} of {size} bytes"
                )
                raise Transient from short
            return data

        return self._call(name, whole)

    def get_ranges(self, name: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return each range, ten requests at a time; only ranges that touch share one."""
        if not ranges:
            return []

        def pieces(client: Any) -> list[bytes]:
            try:
                answers = obstore.get_ranges(
                    client,
                    checked_name(name),
                    starts=[wanted.start for wanted in ranges],
                    lengths=[wanted.length for wanted in ranges],
                    coalesce=0,
                )
            except exceptions.GenericError:
                self._raise_if_too_short(client, name, ranges)
                raise
            except exceptions.NotSupportedError:
                # Some web servers know no ranges.
                self._raise_if_too_short(client, name, ranges)
                whole = self.get(name, max_bytes=MAX_WHOLE_BYTES)
                return [whole[wanted.start : wanted.start + wanted.length] for wanted in ranges]
            found = [answer.to_bytes() for answer in answers]
            if any(len(data) != wanted.length for data, wanted in zip(found, ranges, strict=True)):
                self._raise_if_too_short(client, name, ranges)
                raise Transient from StoreError(f"{self.url}: an answer for {name} broke off")
            return found

        return self._call(name, pieces)

    def size(self, name: str) -> int:
        """Return the object's size, from one head request."""
        return int(
            self._call(name, lambda client: obstore.head(client, checked_name(name))["size"])
        )

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects under a folder; goes on after the last one if it breaks off."""
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"a prefix is a folder ending in a slash, got {prefix!r}")
        if self._scheme in ("http", "https"):
            raise CannotList(f"{self.url} is a web server, which cannot list what it serves")
        folder = checked_name(prefix[:-1]) if prefix else None
        page = self._page(folder, after or None)
        ends: set[str] = set()
        while page:
            if page[-1].name in ends:
                raise StoreError(
                    f"{self.url}: its listing does not go on after {page[-1].name}: the server "
                    "ignores `start-after`; copy the run to a folder or to another service"
                )
            ends.add(page[-1].name)
            # obstore drops an offset's final slash, so a listing may begin a little too early.
            yield from (info for info in page if info.name > after)
            if len(page) < PAGE_OBJECTS:
                return
            page = self._page(folder, page[-1].name)

    def delete(self, name: str) -> None:
        """Remove the object; absent is fine."""
        self._refuse_if_read_only()

        def remove(client: Any) -> None:
            try:
                obstore.delete(client, checked_name(name))
            except FileNotFoundError:
                return

        self._call(name, remove)

    def sync(self, prefix: str) -> None:
        """Do nothing: an answered put is durable."""

    def _put_in_parts(self, client: Any, name: str, views: Sequence[memoryview]) -> None:
        try:
            obstore.put(
                client,
                checked_name(name),
                iter(views),
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )
        except FileNotFoundError as error:
            # An upload whose completion took effect, but whose answer was lost, is gone when the
            # completion is repeated. Nobody can tell that from an upload that was aborted: again.
            summary = f"{self.url}: {name}: its upload is gone ({_summary(error)})"
            raise Transient from StoreError(summary)

    def _page(self, folder: str | None, last: str | None) -> Sequence[ObjectInfo]:
        """Return the next page in the server's own order; from memory, which has none, sorted."""

        def fetch(client: Any) -> Sequence[ObjectInfo]:
            pages: Any = obstore.list(client, folder, offset=last, chunk_size=PAGE_OBJECTS)
            if self._scheme == "memory":
                found = sorted(pages.collect(), key=lambda entry: str(entry["path"]))
            else:
                found = next(iter(pages), [])
            return [ObjectInfo(entry["path"], entry["size"], _stamp(entry)) for entry in found]

        return self._call(folder or "the run", fetch, of_place=True)

    def _exists(self, client: Any, name: str) -> bool:
        try:
            obstore.head(client, name)
        except FileNotFoundError:
            return False
        return True

    def _raise_if_too_short(self, client: Any, name: str, ranges: Sequence[ByteRange]) -> None:
        size = obstore.head(client, checked_name(name))["size"]
        end = max(wanted.start + wanted.length for wanted in ranges)
        if size < end:
            raise DamagedObject(
                f"{self.url}: {name} has {size} bytes, too few for a range up to {end}; "
                "run `attnstore verify`"
            )

    def _refuse_if_read_only(self) -> None:
        if self._scheme in ("http", "https"):
            raise StoreRefused(f"{self.url} can only be read; write to a bucket or a folder")

    def _call(self, name: str, operation: Callable[[Any], T], *, of_place: bool = False) -> T:
        """Do it, again where that may help; `of_place`: only the place itself can be missing."""

        def once() -> T:
            try:
                return operation(self._open())
            except FileNotFoundError as error:
                if of_place:
                    raise StoreRefused(
                        f"{self.url}: the server knows no such bucket or container "
                        f"({_summary(error)}); create it, or correct the URL"
                    ) from None
                raise ObjectNotFound(f"{self.url}: there is no {name}") from error
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
                raise StoreRefused(
                    f"{self.url}: not allowed to use {name} ({_summary(error)}); check the storage "
                    "options and credentials"
                ) from None
            except (exceptions.InvalidPathError, exceptions.NotSupportedError) as error:
                raise StoreRefused(f"{self.url}: {name}: {_summary(error)}") from None
            except exceptions.BaseError as error:
                raise Transient from StoreError(f"{self.url}: {name}: {_summary(error)}")

        return self._policy.call(once)

    def _open(self) -> Any:
        with self._lock:
            if self._client is None or self._process != os.getpid():
                self._client = shared_client(self._address, self._made_of, self._make_client)
                self._process = os.getpid()
            return self._client

    def _make_client(self) -> Any:
        if self._scheme == "memory":
            with _memory_lock:
                return _memory.setdefault(self._address.rstrip("/"), obstores.MemoryStore())
        options = dict(self._options)
        client_options = {
            "timeout": timedelta(seconds=float(options.pop("timeout", REQUEST_SECONDS))),
            "connect_timeout": timedelta(
                seconds=float(options.pop("connect_timeout", CONNECT_SECONDS))
            ),
            **options.pop("client_options", {}),
        }
        arguments: dict[str, Any] = {
            "retry_config": {
                "max_retries": max(0, self._policy.attempts - 1),
                "retry_timeout": timedelta(seconds=min(self._policy.seconds, 240.0)),
            },
        }
        provider = options.pop("credential_provider", None)
        if provider is not None:
            arguments["credential_provider"] = _credential_provider(provider)
        if self._scheme == "http":
            client_options.setdefault("allow_http", True)
        if self._scheme in ("s3", "s3a"):
            endpoint = (
                options.get("endpoint") or options.get("aws_endpoint") or _endpoint_variable()
            )
            plain = str(endpoint or "").startswith("http://")
            if plain:
                client_options.setdefault("allow_http", True)
            # TLS guards the payload on its way already; hashing it costs two thirds of the CPU.
            options.setdefault("unsigned_payload", not plain)
        if options:
            arguments["config"] = options
        make: Any = obstores.from_url
        try:
            return make(self._address, client_options=client_options, **arguments)
        except (exceptions.BaseError, ValueError, TypeError) as error:
            raise StoreRefused(
                f"{self.url}: {_summary(error)}; check the URL and the storage options"
            ) from None


def _stamp(entry: Any) -> str:
    return f"{entry.get('e_tag') or ''} {entry.get('last_modified') or ''}"


def _credential_provider(provider: Any) -> Any:
    if not isinstance(provider, str):
        return provider
    if provider not in CREDENTIAL_PROVIDERS:
        raise StoreRefused(
            f"no credential provider is called {provider!r}: {', '.join(CREDENTIAL_PROVIDERS)} are"
        )
    module, name = CREDENTIAL_PROVIDERS[provider]
    try:
        return getattr(importlib.import_module(module), name)()
    except ImportError as error:
        raise StoreRefused(
            f"the credential provider {provider!r} needs a package: {error}"
        ) from None


def _endpoint_variable() -> str | None:
    return next((os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), None)


def _summary(error: BaseException) -> str:
    """Return the first line of an error without any URL's query, which may hold a signature."""
    return _QUERY.sub("", str(error).strip().split("\n", 1)[0])[:500]
