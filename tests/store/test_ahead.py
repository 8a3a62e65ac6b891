"""Opening a run: what is asked for at once, how often, and that an early answer hides nothing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from store import keys
from store.ahead import Begun, Foreseen
from store.array_reader import ReadOptions
from store.commit import commit_unit, read_commit
from store.errors import CannotList, DamagedObject, ObjectNotFound
from store.objects.fsspec_store import FsspecStore
from store.objects.local import LocalStore
from store.objects.obstore_store import ObstoreStore
from store.run import Run
from store.snapshot import find_committed, write_snapshot
from tests.store.sample_run import RUN_ID, SampleShape, plan_file, write_run
from tests.store.test_snapshot import put_commits, small_commit

SHAPE = SampleShape()


class Remote:
    """A store that takes no small ranges cheaply, counts calls and can hold them together."""

    def __init__(self, inner, meet: int = 0) -> None:
        self._inner = inner
        self.asked: list[str] = []
        self.meeting = threading.Barrier(meet) if meet else None

    def __getattr__(self, name):
        if name == "small_ranges_are_cheap":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def get(self, name, *, max_bytes):
        self._ask(name)
        return self._inner.get(name, max_bytes=max_bytes)

    def get_ranges(self, name, ranges):
        self._ask(name)
        return self._inner.get_ranges(name, ranges)

    def list(self, prefix, *, after=""):
        self._ask(f"{prefix}>{after}")
        return self._inner.list(prefix, after=after)

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.meeting is not None:
            self.meeting.wait(30)


def eager(call):
    """Make a call at once, as the fastest of threads would."""
    begun = Begun(call)
    answer = begun.result()
    return Begun(lambda: answer)


def test_a_first_read_asks_for_each_object_once_and_for_no_more(tmp_path) -> None:
    (unit,) = write_run(LocalStore(tmp_path), SHAPE, [[5, 3]])
    objects = Remote(LocalStore(tmp_path))
    got = Run(objects, ReadOptions()).read("z", prompt=1, layer=0, head=0)
    assert np.array_equal(got.values, unit.arrays["z"][0, 5:, 0])
    asked = sorted(objects.asked)
    assert asked == sorted(
        [
            "run.json", "model.json", ">p", "plan/0000/manifest.json", "commits/>",
            keys.commit_key(0), plan_file(objects, "prompts"),
            f"{keys.attempt_prefix(0, 'a0')}z/c/0/0/0/0",
        ]
    )  # fmt: skip


@pytest.mark.parametrize("prompt", [3, "p3"])
def test_opening_is_one_round_trip(tmp_path, prompt) -> None:
    write_run(LocalStore(tmp_path), SHAPE, [[5, 3], [4, 2]])
    objects = Remote(LocalStore(tmp_path), meet=5)
    run = Run(objects, ReadOptions())
    assert len(objects.asked) == 5
    assert run.id == RUN_ID
    objects.meeting = threading.Barrier(3)
    assert len(run.refresh()._index.committed) == 2
    assert len(objects.asked) == 8
    objects.meeting = None
    assert run.read("z", prompt=prompt).coords["prompt"].item() == "p3"


def test_a_store_that_lists_whole_folders_is_never_asked_for_all_of_a_run(tmp_path) -> None:
    objects = FsspecStore("memory://whole-folders")
    write_run(objects, SHAPE, [[5, 3]])
    write_snapshot(objects, RUN_ID)
    asking = Remote(objects)
    run = Run(asking, ReadOptions())
    assert run.read("z", prompt=1).sizes["pos"] == 3
    listings = {what for what in asking.asked if ">" in what}
    assert listings == {"plan/>", "snapshots/>", "commits/>", "commits/>commits/0"}


def test_an_open_run_holds_no_thread_until_it_reads(tmp_path) -> None:
    write_run(LocalStore(tmp_path), SHAPE, [[5, 3]])
    run = Run(Remote(LocalStore(tmp_path)), ReadOptions())
    for thread in threading.enumerate():
        if thread.name.startswith("attnstore-open"):
            thread.join(30)
            assert not thread.is_alive()
    assert not [t for t in threading.enumerate() if t.name.startswith("attnstore-open")]
    assert run._reader._pool is None


def test_with_a_snapshot_the_commit_comes_with_the_tables(tmp_path) -> None:
    write_run(LocalStore(tmp_path), SHAPE, [[5, 3], [4, 2]])
    write_snapshot(LocalStore(tmp_path), RUN_ID)
    objects = Remote(LocalStore(tmp_path))
    run = Run(objects, ReadOptions())
    objects.asked.clear()
    objects.meeting = threading.Barrier(4)
    run._index.begin(2)
    objects.meeting.wait(30)
    objects.meeting = None
    local = LocalStore(tmp_path)
    assert sorted(objects.asked) == [
        keys.commit_key(1), plan_file(local, "prompts"), plan_file(local, "units"),
    ]  # fmt: skip
    assert run.read("z", prompt=2).sizes["pos"] == 4
    assert len(objects.asked) == len(set(objects.asked))


def test_a_listing_older_than_the_snapshot_hides_no_commit_and_no_repair(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    put_commits(objects, range(3))
    early = Foreseen(objects, eager, gets=[], lists=[(keys.COMMITS, "")])
    put_commits(objects, range(3, 5))
    assert commit_unit(objects, small_commit(1, repair=1)).won
    write_snapshot(objects, RUN_ID)
    found = find_committed(early, RUN_ID)
    assert found.units().tolist() == [0, 1, 2, 3, 4]
    assert found.key(1) == keys.commit_key(1, 1)
    assert found.table()["repair"].tolist() == [0, 1, 0, 0, 0]


def test_a_listing_older_than_a_complete_folder_is_not_used(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    put_commits(objects, range(999))
    early = Foreseen(objects, eager, gets=[], lists=[(keys.COMMITS, ""), ("", keys.BEFORE_PLAN)])
    put_commits(objects, range(999, 1002))
    found = find_committed(early, RUN_ID)
    assert len(found) == 999
    write_snapshot(objects, RUN_ID)
    early = Foreseen(objects, eager, gets=[], lists=[(keys.COMMITS, ""), ("", keys.BEFORE_PLAN)])
    put_commits(objects, range(1002, 1004))
    assert commit_unit(objects, small_commit(7, repair=1)).won
    found = find_committed(early, RUN_ID)
    assert (len(found), found.key(7)) == (1004, keys.commit_key(7, 1))


def test_an_answer_is_given_out_once_and_errors_come_where_they_are_asked_for(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    objects.put("a", [b"old"])
    early = Foreseen(objects, eager_errors, gets=[("a", 9), ("b", 9)], lists=[])
    objects.put("a", [b"new"])
    assert early.get("a", max_bytes=9) == b"old"
    assert early.get("a", max_bytes=9) == b"new"
    with pytest.raises(ObjectNotFound):
        early.get("b", max_bytes=9)
    objects.put("b", [b"there"])
    assert early.get("b", max_bytes=9) == b"there"


def eager_errors(call):
    with ThreadPoolExecutor(1) as pool:
        return Begun(call, pool)


def test_one_listing_answers_for_the_folders_it_covers(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    for name in ("commits/a", "data/b", "plan/0000/c", "run.json", "snapshots/d", "snapshots/e"):
        objects.put(name, [b""])
    early = Foreseen(objects, eager, gets=[], lists=[("", keys.BEFORE_PLAN)])

    def names(prefix):
        return sorted(info.name for info in early.list(prefix))

    assert names("plan/") == ["plan/0000/c"]
    objects.put("plan/0001/f", [b""])
    objects.put("snapshots/g", [b""])
    assert names("snapshots/") == ["snapshots/d", "snapshots/e"]
    assert names("commits/") == ["commits/a"]
    assert names("snapshots/") == ["snapshots/d", "snapshots/e", "snapshots/g"]
    assert names("plan/") == ["plan/0000/c", "plan/0001/f"]


def test_a_web_server_that_lists_nothing_says_so(tmp_path) -> None:
    web = ObstoreStore("http://127.0.0.1:9/run")
    early = Foreseen(web, Begun, gets=[], lists=[(keys.COMMITS, "")])
    with pytest.raises(CannotList):
        list(early.list(keys.COMMITS))


def test_whoever_needs_a_call_that_waits_for_its_thread_makes_it() -> None:
    free = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(free.wait, 30)
        assert Begun(threading.get_ident, pool).result() == threading.get_ident()
        free.set()
    with ThreadPoolExecutor(1) as pool:
        begun = Begun(threading.get_ident, pool)
        pool.submit(int).result()
        assert begun.result() != threading.get_ident()


def test_rows_that_contradict_the_plan_are_never_given_out(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    write_run(objects, SHAPE, [[5, 3]])
    other = LocalStore(tmp_path / "other")
    write_run(other, SHAPE, [[4, 4]])
    objects.delete(keys.commit_key(0))
    for info in list(other.list(keys.DATA)):
        objects.put(info.name, [other.get(info.name, max_bytes=1 << 30)])
    commit = read_commit(other, keys.commit_key(0))
    # As the first runs have it; with a hash its rows are not even looked at.
    objects.put(keys.commit_key(0), [commit.model_copy(update={"plan_hash": None}).to_bytes()])
    run = Run(Remote(objects), ReadOptions())
    with pytest.raises(ValueError, match="the plan gives it 5 tokens"):
        run.read("z", prompt=0)


def test_a_table_that_could_not_be_read_is_asked_for_again(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    write_run(objects, SHAPE, [[5, 3]])
    name = plan_file(objects, "prompts")
    whole = objects.get(name, max_bytes=1 << 30)
    objects.put(name, [whole[:-1]])
    run = Run(Remote(objects), ReadOptions())
    for _ in range(2):
        with pytest.raises(DamagedObject):
            run.read("z", prompt=0)
    objects.put(name, [whole])
    assert run.read("z", prompt=0).sizes["pos"] == 5
