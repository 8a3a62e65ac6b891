"""The pointer to the latest snapshot: writers that race, die or are slow never leave an older one.

Only readers of a web-served run follow it; all others list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from store import keys
from store.errors import CannotList, StoreError
from store.gc import collect_garbage
from store.objects.local import LocalStore
from store.snapshot import (
    LATEST,
    MANIFEST,
    find_committed,
    latest_snapshot,
    snapshot_names,
    write_snapshot,
)
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, write_run
from tests.store.test_snapshot import put_commits


class Interrupted:
    """A store whose first call of one kind on names that begin so is preceded by one of ours."""

    def __init__(self, inner: Any, method: str, name: str, before: Callable[[], None]) -> None:
        self._inner = inner
        self._method, self._name = method, name
        self._before: Callable[[], None] | None = before

    def __getattr__(self, method: str) -> Any:
        real = getattr(self._inner, method)

        def call(name: str, *rest: Any, **named: Any) -> Any:
            if name.startswith(self._name) and self._before is not None:
                before, self._before = self._before, None
                before()
            return real(name, *rest, **named)

        return call if method == self._method else real


class ListsNothing:
    """A store as a static web server is one: what can be read must be known by name."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def list(self, prefix: str, *, after: str = "") -> Any:
        raise CannotList(f"cannot list {prefix}{after}")


@pytest.mark.parametrize("method", ["get", "put"])
def test_a_slow_writer_never_leaves_the_older_name(objects, method) -> None:
    put_commits(objects, range(3))
    write_snapshot(objects, RUN_ID)

    def another() -> None:
        put_commits(objects, range(3, 7))
        write_snapshot(objects, RUN_ID)

    slow = write_snapshot(Interrupted(objects, method, LATEST, another), RUN_ID)
    assert slow.units == 3
    assert latest_snapshot(objects).name == snapshot_names(objects)[-1]
    assert latest_snapshot(objects).units == 7
    assert len(find_committed(ListsNothing(objects), RUN_ID)) == 7


def test_of_two_that_took_one_number_the_one_with_more_units_is_named(objects) -> None:
    put_commits(objects, range(3))
    written = []

    def another() -> None:
        put_commits(objects, range(3, 7))
        written.append(write_snapshot(objects, RUN_ID))

    # The other one lists, and takes the same number, before this one has written anything.
    slow = Interrupted(objects, "sync", keys.SNAPSHOTS, another)
    written.append(write_snapshot(slow, RUN_ID))
    assert {one.name[:8] for one in written} == {"00000000"}
    assert [one.units for one in written] == [7, 3]
    assert latest_snapshot(objects).units == 7


def test_many_writers_at_once_leave_the_newest(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    put_commits(objects, range(2))
    gate = threading.Barrier(6)

    def write(number: int) -> None:
        gate.wait(60)
        for unit in range(3):
            put_commits(objects, range(10 * number + unit, 10 * number + unit + 1))
            write_snapshot(objects, RUN_ID)

    threads = [threading.Thread(target=write, args=(n,), daemon=True) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    named = latest_snapshot(objects)
    assert named.name[:8] == snapshot_names(objects)[-1][:8]
    assert len(snapshot_names(objects)) == 18


@pytest.mark.parametrize("held", [b"", b"{}", b"x" * 400])
def test_a_damaged_pointer_is_replaced(tmp_path, held) -> None:
    objects = LocalStore(tmp_path)
    put_commits(objects, range(2))
    objects.put(LATEST, [held])
    written = write_snapshot(objects, RUN_ID)
    assert latest_snapshot(objects) == written


def test_one_that_dies_between_leaves_the_older_name_until_the_next(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), [[3], [4]])

    def another() -> None:
        write_snapshot(objects, RUN_ID)
        write_snapshot(objects, RUN_ID)

    def dies(prefix: str, **_named: Any) -> Any:
        raise StoreError(f"gone before it listed {prefix}")

    dying: Any = Interrupted(objects, "put", LATEST, another)
    put = dying.put

    def put_and_die(name: str, parts: Any) -> None:
        put(name, parts)
        if name == LATEST:
            dying.list = dies

    dying.put = put_and_die
    with pytest.raises(StoreError, match="gone before"):
        write_snapshot(dying, RUN_ID)
    older = latest_snapshot(objects).name
    assert older == snapshot_names(objects)[0]

    # Until then what it names stays there for whoever follows it.
    report = collect_garbage(objects, delete=True)
    assert report.garbage == []
    assert verify_run(objects, deep=True).ok
    assert find_committed(ListsNothing(objects), RUN_ID).snapshot == older
    newest = write_snapshot(objects, RUN_ID)
    assert latest_snapshot(objects) == newest
    (gone, _) = collect_garbage(objects, delete=True).garbage
    assert gone.prefix == f"{keys.SNAPSHOTS}{older}/"
    assert verify_run(objects, deep=True).ok


def test_a_pointer_to_what_is_not_there_is_found(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), [[3]])
    name = write_snapshot(objects, RUN_ID).name
    for file in (MANIFEST, "units.parquet", "exceptions.parquet"):
        objects.delete(f"{keys.SNAPSHOTS}{name}/{file}")
    (problem,) = verify_run(objects).problems
    assert (problem.name, problem.message) == (
        LATEST,
        f"names the snapshot {name}, which is not there",
    )
