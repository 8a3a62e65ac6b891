"""Calls begun before their answers are needed, so that a run's first requests overlap.

Knows threads and an object store; never knows what the answers mean. Everything that checks an
answer runs as if the call had been made where its answer is asked for: `Foreseen` only keeps what
came early, and hands each answer out once.

A listing begun together with another may be older than what that other one led to: `store.snapshot`
lists commits anew where it found a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeVar

from store.objects.protocol import ObjectInfo, ObjectStore

T = TypeVar("T")


class Begin(Protocol):
    """What begins calls: a run's reading threads, or `Begun` itself, which puts them off."""

    def __call__(self, call: Callable[[], T], /) -> Begun[T]: ...


class Begun(Generic[T]):
    """A call begun on another thread, or one to be made when its answer is asked for."""

    def __init__(self, call: Callable[[], T], pool: Executor | None = None) -> None:
        self._call = call
        self._future = None if pool is None else pool.submit(call)

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; ask once.

        A call still waiting for its thread is made here instead: threads of the pool itself may
        ask without ever waiting for each other's places.
        """
        if self._future is None or self._future.cancel():
            return self._call()
        return self._future.result()


@contextmanager
def asked_at_once(
    objects: ObjectStore, *, gets: Sequence[tuple[str, int]], lists: Sequence[tuple[str, str]]
) -> Iterator[tuple[ObjectStore, Begin]]:
    """Give the store with these answers on their way, and what begins more calls.

    Its threads are gone afterwards, so that many open runs hold none. Local files are asked when
    their turn comes: no thread is as fast as they are.
    """
    if getattr(objects, "small_ranges_are_cheap", False):
        yield objects, Begun
        return
    pool = ThreadPoolExecutor(len(gets) + len(lists), thread_name_prefix="attnstore-open")
    begin: Begin = partial(Begun, pool=pool)
    try:
        yield Foreseen(objects, begin, gets=gets, lists=lists), begin
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Foreseen:
    """An object store for reading whose first answers were all asked for at once.

    `gets` are names and their bounds; `lists` are (prefix, after) as `ObjectStore.list` takes them,
    and one answers for every folder that it covers. An answer is handed out once for each object
    and each folder; what was not foreseen, and what is asked for again, goes to the store.
    """

    def __init__(
        self,
        objects: ObjectStore,
        begin: Begin,
        *,
        gets: Sequence[tuple[str, int]],
        lists: Sequence[tuple[str, str]],
    ) -> None:
        self._objects = objects
        self._lists = [
            (prefix, after, _Listing(begin(partial(first_page, objects, prefix, after))))
            for prefix, after in lists
        ]
        self._gets = {
            (name, most): begin(partial(objects.get, name, max_bytes=most)) for name, most in gets
        }
        self._listed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Return the object, as the store's own `get` does."""
        begun = self._gets.pop((name, max_bytes), None)
        return self._objects.get(name, max_bytes=max_bytes) if begun is None else begun.result()

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects under a folder, as the store's own `list` does."""
        if not after and prefix not in self._listed:
            for covered, skipped, listing in self._lists:
                if prefix.startswith(covered) and skipped < prefix:
                    self._listed.add(prefix)
                    return (one for one in listing.objects() if one.name.startswith(prefix))
        return self._objects.list(prefix, after=after)


class _Listing:
    """A listing on its way; read as far as someone asks, and kept for the next who does."""

    def __init__(self, begun: Begun[Iterator[ObjectInfo]]) -> None:
        self._begun = begun
        self._found: list[ObjectInfo] = []
        self._rest: Iterator[ObjectInfo] | None = None

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield all objects, those yielded before first."""
        if self._rest is None:
            self._rest = self._begun.result()
        yield from self._found
        for one in self._rest:
            self._found.append(one)
            yield one


def first_page(objects: ObjectStore, prefix: str, after: str) -> Iterator[ObjectInfo]:
    """Return a listing whose first page is already here; the others come when they are wanted."""
    found = iter(objects.list(prefix, after=after))
    return chain(list(islice(found, 1)), found)
