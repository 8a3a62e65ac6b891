"""Objects in any file system that fsspec knows. Read-only unless create-only puts are known atomic.

fsspec's generic "create" looks whether the name is taken and then writes, so two writers can both
win; of its file systems only the in-memory one is written here, under one lock of this process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from typing_extensions import Buffer

from store.errors import DamagedObject, ObjectExists, ObjectNotFound, StoreError, StoreRefused
from store.keys import checked_name
from store.objects.protocol import ByteRange, ObjectInfo

_writing = threading.RLock()


class FsspecStore:
    """An `ObjectStore` over an fsspec file system; `options` are that file system's own."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._address = url
        self._options = dict(options or {})
        self._opened: tuple[Any, str] | None = None

    @property
    def url(self) -> str:
        scheme, _, rest = self._address.partition("://")
        authority, slash, path = rest.partition("/")
        return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path.partition('?')[0]}"

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        """Write the parts as one file."""
        with _writing:
            self._writable().pipe_file(self._path(name), b"".join(bytes(part) for part in parts))

    def create(self, name: str, data: Buffer) -> None:
        """Write the file if its name is free, under this process's lock."""
        with _writing:
            files = self._writable()
            if files.exists(self._path(name)):
                raise ObjectExists(f"{self.url}: {name} is already there")
            files.pipe_file(self._path(name), bytes(data))

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Return the whole file; its size is asked first."""
        size = self.size(name)
        if size > max_bytes:
            raise StoreRefused(f"{self.url}: {name} has {size} bytes, {max_bytes} are allowed")
        data = bytes(self._files()[0].cat_file(self._path(name)))
        if len(data) != size:
            raise StoreError(f"{self.url}: {name} broke off after {len(data)} of {size} bytes")
        return data

    def get_ranges(self, name: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return each range; fsspec fetches them side by side where the file system can."""
        if not ranges:
            return []
        path = self._path(name)
        size = self.size(name)
        end = max(wanted.start + wanted.length for wanted in ranges)
        if size < end or min(min(wanted.start, wanted.length) for wanted in ranges) < 0:
            raise DamagedObject(
                f"{self.url}: {name} has {size} bytes, too few for a range up to {end}; "
                "run `attnstore verify`"
            )
        starts = [wanted.start for wanted in ranges]
        ends = [wanted.start + wanted.length for wanted in ranges]
        found = self._files()[0].cat_ranges([path] * len(ranges), starts, ends, on_error="raise")
        for data, wanted in zip(found, ranges, strict=True):
            if len(data) != wanted.length:
                raise StoreError(f"{self.url}: an answer for {name} broke off")
        return [bytes(data) for data in found]

    def size(self, name: str) -> int:
        """Return the file's size."""
        try:
            found = self._files()[0].info(self._path(name))
        except FileNotFoundError as error:
            raise ObjectNotFound(f"{self.url}: there is no {name}") from error
        if found["type"] != "file":
            raise ObjectNotFound(f"{self.url}: {name} is a folder, not an object")
        return int(found["size"])

    lists_whole_folders = True
    """A listing goes over all that lies in the folder, whatever `after` leaves out of it."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the files under a folder by name."""
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"a prefix is a folder ending in a slash, got {prefix!r}")
        files, root = self._files()
        folder = f"{root}/{checked_name(prefix[:-1])}" if prefix else root
        found = files.find(folder, detail=True)
        for path in sorted(found):
            name = path[len(root) + 1 :]
            if path.startswith(root + "/") and found[path]["type"] == "file" and name > after:
                details = found[path]
                stamp = details.get("ETag") or details.get("mtime") or ""
                yield ObjectInfo(name, int(details["size"]), str(stamp))

    def delete(self, name: str) -> None:
        """Remove the file; absent is fine."""
        with _writing:
            files = self._writable()
            if files.exists(self._path(name)):
                files.rm_file(self._path(name))

    def sync(self, prefix: str) -> None:
        """Do nothing: what is written here lives only as long as the process."""

    def _files(self) -> tuple[Any, str]:
        if self._opened is None:
            try:
                files, root = fsspec.core.url_to_fs(self._address, **self._options)
            except (ValueError, ImportError) as error:
                scheme = urlsplit(self._address).scheme
                raise StoreRefused(
                    f"{self.url}: no back end for {scheme} URLs ({error})"
                ) from error
            self._opened = (files, root.rstrip("/"))
        return self._opened

    def _path(self, name: str) -> str:
        return f"{self._files()[1]}/{checked_name(name)}"

    def _writable(self) -> Any:
        files = self._files()[0]
        if not isinstance(files, MemoryFileSystem):
            raise StoreRefused(
                f"{self.url} can only be read: {type(files).__name__} does not promise that one of "
                "several writers wins; write to a folder, s3://, gs:// or az://"
            )
        return files
