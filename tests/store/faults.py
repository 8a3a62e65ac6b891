"""An object store that fails by plan, before or after the operation takes effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from store.errors import StoreError
from store.objects.protocol import ByteRange, ObjectInfo, ObjectStore


class When(Enum):
    """On which side of its effect an operation fails."""

    BEFORE = "before"
    AFTER = "after"


class InjectedFault(StoreError):
    """The failure that a test asked for."""


@dataclass
class FaultyStore:
    """Passes everything on; write number `fail_at` (from 0) fails, and with `dead` all after it."""

    inner: ObjectStore
    fail_at: int = -1
    when: When = When.BEFORE
    dead: bool = False
    writes: int = 0

    @property
    def url(self) -> str:
        return self.inner.url

    def put(self, name: str, parts: Sequence[bytes]) -> None:
        self._write(name, lambda: self.inner.put(name, parts))

    def create(self, name: str, data: bytes) -> None:
        self._write(name, lambda: self.inner.create(name, data))

    def delete(self, name: str) -> None:
        self._write(name, lambda: self.inner.delete(name))

    def get(self, name: str, *, max_bytes: int) -> bytes:
        self._check_alive()
        return self.inner.get(name, max_bytes=max_bytes)

    def get_ranges(self, name: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        self._check_alive()
        return self.inner.get_ranges(name, ranges)

    def size(self, name: str) -> int:
        self._check_alive()
        return self.inner.size(name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self._check_alive()
        return self.inner.list(prefix, after=after)

    def sync(self, prefix: str) -> None:
        self._check_alive()
        self.inner.sync(prefix)

    def _write(self, name, operation) -> None:
        self._check_alive()
        number, self.writes = self.writes, self.writes + 1
        if number == self.fail_at and self.when is When.BEFORE:
            raise InjectedFault(f"{name}: write {number} failed before its effect")
        operation()
        if number == self.fail_at:
            raise InjectedFault(f"{name}: the answer of write {number} was lost")

    def _check_alive(self) -> None:
        if self.dead and self.writes > self.fail_at >= 0:
            raise InjectedFault("the client is dead")
