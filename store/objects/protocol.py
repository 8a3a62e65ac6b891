"""The one small protocol that everything durable goes through.

An `ObjectStore` is rooted at a URL; names are relative, slash-separated, checked by `store.keys`.
Every put is whole-object: a reader sees all of it or none. `create` is atomic: of any number of
writers that race one name exactly one wins and the others get `ObjectExists`.

Bounds: no call reads more into memory than it is allowed or asked for, and none copies a put's
parts together above 32 MiB. Every call ends: a back end over a network gives each request a
time-out (120 s unless options say otherwise), tries again with growing random pauses for at most
180 s, then raises `StoreError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as a listing shows it.

    `stamp` differs where an object was deleted and made again, on back ends that tell: a reader
    that keeps what it read holds on to it for as long as the stamp stays. It says nothing of order.
    """

    name: str
    bytes: int
    stamp: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes from `start`."""

    start: int
    length: int


@runtime_checkable
class ObjectStore(Protocol):
    """Where a run's objects live."""

    @property
    def url(self) -> str:
        """The root, for messages; never carries credentials."""

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        """Store the concatenation of `parts` durably, replacing what was there. May be repeated.

        `parts` is gone through once, in order, and a part may be made when its turn comes.
        """

    def create(self, name: str, data: Buffer) -> None:
        """Store `data` durably if there is no such object, else raise `ObjectExists`. Atomic."""

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole object. `ObjectNotFound` if absent, `StoreError` if over `max_bytes`."""

    def get_ranges(self, name: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return each range, exactly as long as asked; a short object raises `DamagedObject`."""

    def size(self, name: str) -> int:
        """Return an object's size in bytes. `ObjectNotFound` if absent."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield every object under `prefix` (a folder and its slash, or ""), in no stated order.

        Only names above `after`; what is skipped costs nothing, a folder at a time. `after` must
        not be a folder's name: some servers then skip that whole folder.
        """

    def delete(self, name: str) -> None:
        """Remove an object; absent is fine."""

    def sync(self, prefix: str) -> None:
        """Return once all objects put under `prefix` survive a power cut (no-op where puts do)."""
