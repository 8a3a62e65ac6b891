"""What every back end owes: the `ObjectStore` protocol, checked over all of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from store.errors import DamagedObject, ObjectExists, ObjectNotFound, StoreError, UnsafeName
from store.objects.probe import probe_create_only
from store.objects.protocol import ByteRange, ObjectInfo, ObjectStore


def test_it_is_an_object_store(objects):
    assert isinstance(objects, ObjectStore)


def test_put_gathers_its_parts_and_replaces(objects):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    objects.put("a/b/c", [b"head", memoryview(values).cast("B"), b"", bytearray(b"tail")])
    expected = b"head" + values.tobytes() + b"tail"
    assert objects.get("a/b/c", max_bytes=1000) == expected
    assert objects.size("a/b/c") == len(expected)
    objects.put("a/b/c", [b"new"])
    assert objects.get("a/b/c", max_bytes=3) == b"new"


def test_an_empty_object_is_an_object(objects):
    objects.put("empty", [])
    assert objects.get("empty", max_bytes=10) == b""
    assert objects.size("empty") == 0


def test_create_never_replaces(objects):
    objects.create("one", b"first")
    with pytest.raises(ObjectExists, match="one"):
        objects.create("one", b"second")
    assert objects.get("one", max_bytes=100) == b"first"
    objects.put("two", [b"x"])
    with pytest.raises(FileExistsError):
        objects.create("two", b"y")


def test_of_racing_creates_exactly_one_wins(objects):
    gate = threading.Barrier(8)

    def race(number: int) -> bytes | None:
        gate.wait(20)
        try:
            objects.create("raced", f"{number}".encode() * 1000)
        except ObjectExists:
            return None
        return f"{number}".encode() * 1000

    with ThreadPoolExecutor(8) as pool:
        winners = [body for body in pool.map(race, range(8)) if body is not None]
    assert winners == [objects.get("raced", max_bytes=8000)]


def test_the_probe_accepts_it_and_leaves_nothing(objects):
    probe_create_only(objects)
    assert list(objects.list("")) == []


def test_absent_objects(objects):
    objects.put("there", [b"x"])
    for read in (
        lambda: objects.get("absent", max_bytes=10),
        lambda: objects.get("there/below", max_bytes=10),
        lambda: objects.size("absent"),
        lambda: objects.get_ranges("absent", [ByteRange(0, 1)]),
    ):
        with pytest.raises(ObjectNotFound, match=r"absent|below"):
            read()
    objects.delete("absent")


def test_a_folder_is_no_object(objects):
    objects.put("folder/below/x", [b"x"])
    for name in ("folder", "folder/below"):
        for read in (
            lambda name=name: objects.get(name, max_bytes=1 << 20),
            lambda name=name: objects.size(name),
            lambda name=name: objects.get_ranges(name, [ByteRange(0, 1)]),
        ):
            with pytest.raises(ObjectNotFound):
                read()
    assert [info.name for info in objects.list("")] == ["folder/below/x"]


def test_a_bigger_object_than_allowed_is_not_read(objects):
    objects.put("big", [b"x" * 1000])
    with pytest.raises(StoreError, match="1000"):
        objects.get("big", max_bytes=999)


def test_ranges_are_exact_or_damage(objects):
    data = np.random.default_rng(0).bytes(100_000)
    objects.put("r", [data])
    wanted = [ByteRange(0, 10), ByteRange(99_000, 1000), ByteRange(5, 3), ByteRange(8, 50_000)]
    found = objects.get_ranges("r", wanted)
    assert found == [data[r.start : r.start + r.length] for r in wanted]
    assert objects.get_ranges("r", []) == []
    for beyond in (ByteRange(99_999, 2), ByteRange(100_000, 1), ByteRange(1 << 40, 5)):
        with pytest.raises(DamagedObject, match="r"):
            objects.get_ranges("r", [ByteRange(0, 1), beyond])


def test_listing_is_by_folder_and_complete(objects):
    names = [f"data/{i:04d}/z" for i in range(30)] + ["data2/x", "top", "data/a.json"]
    for name in names:
        objects.put(name, [name.encode()])
    assert set(objects.list("data/")) == {
        ObjectInfo(name, len(name)) for name in names if name.startswith("data/")
    }
    assert sorted(info.name for info in objects.list("")) == sorted(names)
    assert list(objects.list("dat/")) == []
    assert list(objects.list("absent/")) == []
    with pytest.raises(ValueError, match="slash"):
        list(objects.list("dat"))


def test_listing_after_a_name_skips_what_is_not_above_it(objects):
    names = ["c/0/x", "c/00/y", "c/1/a", "c/1/b", "c/10/a", "c/2", "d/1"]
    for name in names:
        objects.put(name, [b"x"])
    for after in ["", "c/0/x", "c/00z", "c/1/a", "c/1/b", "c/1/z", "c/2", "c/9", "zz"]:
        expected = sorted(name for name in names if name.startswith("c/") and name > after)
        assert sorted(i.name for i in objects.list("c/", after=after)) == expected, after


def test_listing_goes_over_many_pages(objects):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: objects.put(f"many/{i:05d}", [b"x"]), range(1100)))
    found = [info.name for info in objects.list("many/")]
    assert sorted(found) == [f"many/{i:05d}" for i in range(1100)]


def test_delete_removes_one(objects):
    objects.put("d/one", [b"1"])
    objects.put("d/two", [b"2"])
    objects.delete("d/one")
    assert [info.name for info in objects.list("")] == ["d/two"]
    objects.put("d/one", [b"again"])
    assert objects.get("d/one", max_bytes=10) == b"again"


def test_a_big_object_arrives_whole(objects):
    block = np.random.default_rng(1).bytes(1 << 20)
    parts = [memoryview(block)[:700_001], memoryview(block)[700_001:]] * 40
    objects.put("big", parts)
    assert objects.size("big") == 40 << 20
    assert objects.get("big", max_bytes=40 << 20) == block * 40


def test_names_cannot_leave_the_run(objects):
    for name in ("../x", "/etc/passwd", "a/../b", "a//b", "", "a/./b", ".hidden", "a\\b", "a\nb"):
        for call in (
            lambda name=name: objects.get(name, max_bytes=1),
            lambda name=name: objects.put(name, [b"x"]),
            lambda name=name: objects.create(name, b"x"),
            lambda name=name: objects.delete(name),
            lambda name=name: objects.size(name),
        ):
            with pytest.raises(UnsafeName):
                call()


def test_many_threads_share_one_store(objects):
    def work(number: int) -> bool:
        body = f"{number}".encode() * 5000
        objects.put(f"t/{number}", [body])
        return objects.get(f"t/{number}", max_bytes=1 << 20) == body

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))


def test_sync_of_anything_returns(objects):
    objects.put("data/u/a/x", [b"x"])
    objects.sync("data/u/a/")
    objects.sync("absent/")
    objects.sync("")
