"""What local files owe beyond the protocol: durability, and no trace of what failed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from store.errors import ObjectExists, ObjectNotFound, StoreError
from store.objects import local, real_folders
from store.objects.local import LocalStore
from tests.store.sample_run import SampleShape, capture, make_unit


@pytest.fixture
def calls(monkeypatch):
    """Records flushes, links and renames by path, in order."""
    seen: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "link", "replace")}

    def path_of(descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())

    def record(name, target_of):
        def call(*args):
            seen.append((name, target_of(*args)))
            return real[name](*args)

        monkeypatch.setattr(local.os, name, call)

    record("fsync", path_of)
    record("link", lambda _source, target: target)
    record("replace", lambda _source, target: target)
    return seen


def test_a_create_flushes_the_file_then_links_then_flushes_every_folder(tmp_path, calls):
    LocalStore(tmp_path / "run").create("commits/000000/x.json", b"{}")
    names = [name for name, _ in calls]
    assert names[:2] == ["fsync", "link"]
    assert "/.tmp/" in calls[0][1]
    flushed = [path for name, path in calls[2:] if name == "fsync"]
    root = str(tmp_path / "run")
    assert flushed == [f"{root}/commits/000000", f"{root}/commits", root, str(tmp_path)]


def test_a_unit_is_durable_before_its_commit(tmp_path, calls):
    shape = SampleShape()
    capture(LocalStore(tmp_path), shape, make_unit(shape, 0, 0, [300], 1))
    links = [place for place, (name, _) in enumerate(calls) if name == "link"]
    assert len(links) == 1
    replaced = {path for name, path in calls[: links[0]] if name == "replace"}
    assert len(replaced) > 10
    last_replace = max(place for place, (name, _) in enumerate(calls) if name == "replace")
    flushed = {path for name, path in calls[last_replace : links[0]] if name == "fsync"}
    for path in replaced:
        for folder in Path(path).relative_to(tmp_path).parents:
            assert str(tmp_path / folder) in flushed, folder
    assert str(tmp_path) in flushed
    # Every file was flushed under its temporary name before it was renamed.
    assert sum("/.tmp/" in path for name, path in calls if name == "fsync") == len(replaced) + 1


def test_the_folders_of_a_unit_are_flushed_side_by_side(tmp_path, monkeypatch):
    objects = LocalStore(tmp_path)
    for number in range(12):
        objects.put(f"data/u/a/{number}/x", [b"x"])
    flushes, real = threading.Barrier(4), os.fsync

    def meet(descriptor):
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(f"{tmp_path}/data/u/a/"):
            flushes.wait(20)
        real(descriptor)

    monkeypatch.setattr(local.os, "fsync", meet)
    objects.sync("data/u/a/")


def test_a_unit_of_which_one_folder_cannot_be_flushed_is_not_called_durable(tmp_path, monkeypatch):
    objects = LocalStore(tmp_path)
    for number in range(12):
        objects.put(f"data/u/a/{number}/x", [b"x"])
    real = os.fsync

    def fail_once(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "7":
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(local.os, "fsync", fail_once)
    with pytest.raises(StoreError, match="Input/output") as caught:
        objects.sync("data/u/a/")
    assert caught.value.errno == errno.EIO


PUT, CREATE = "put", "create"


@pytest.mark.parametrize(
    ("call", "write"),
    [("fsync", PUT), ("fsync", CREATE), ("writev", PUT), ("writev", CREATE), ("replace", PUT),
     ("link", CREATE)],
)  # fmt: skip
def test_a_full_or_failing_disk_leaves_no_trace(tmp_path, monkeypatch, call, write):
    objects = LocalStore(tmp_path)
    objects.put("kept", [b"old"])

    def fail(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local.os, call, fail)
    with pytest.raises(StoreError, match="No space left") as caught:
        objects.put("kept", [b"new"]) if write == PUT else objects.create("other", b"x")
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert objects.get("kept", max_bytes=10) == b"old"
    assert [info.name for info in objects.list("")] == ["kept"]
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_a_create_whose_folder_cannot_be_flushed_is_not_called_done(tmp_path, monkeypatch):
    objects = LocalStore(tmp_path)
    real = os.fsync

    def fail_on_folders(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(local.os, "fsync", fail_on_folders)
    with pytest.raises(StoreError, match="Input/output"):
        objects.create("x", b"x")


def test_a_link_whose_answer_was_lost_has_won(tmp_path, monkeypatch):
    real = os.link

    def link_twice(source, target):
        real(source, target)
        real(source, target)

    monkeypatch.setattr(local.os, "link", link_twice)
    objects = LocalStore(tmp_path)
    objects.create("x", b"mine")
    with pytest.raises(ObjectExists):
        objects.create("x", b"another's")
    assert objects.get("x", max_bytes=10) == b"mine"


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(local.os, "writev", lambda fd, parts: real(fd, [parts[0][:7]]))
    LocalStore(tmp_path).put("x", [b"0123456789" * 10, b"", b"abc"])
    assert (tmp_path / "x").read_bytes() == b"0123456789" * 10 + b"abc"


def test_more_parts_than_one_call_takes(tmp_path):
    parts = [bytes([number % 256]) for number in range(5000)]
    LocalStore(tmp_path).put("x", parts)
    assert (tmp_path / "x").read_bytes() == b"".join(parts)


def test_folders_removed_by_another_process_are_made_again(tmp_path):
    objects = LocalStore(tmp_path)
    objects.put("data/u/a/x", [b"x"])
    shutil.rmtree(tmp_path / "data")
    shutil.rmtree(tmp_path / ".tmp")
    objects.put("data/u/a/y", [b"y"])
    assert [info.name for info in objects.list("")] == ["data/u/a/y"]


def test_a_writer_of_many_folders_does_not_remember_them_all(tmp_path, monkeypatch):
    monkeypatch.setattr(real_folders, "FOLDERS_REMEMBERED", 8)
    store = LocalStore(tmp_path)
    for folder in range(50):
        store.put(f"data/{folder:08d}/a/x", [b"1"])
        assert len(store._folders) <= 8
    assert len(list(store.list(""))) == 50


def test_a_killed_writer_leaves_the_old_object_or_the_new_one(tmp_path):
    objects = LocalStore(tmp_path)
    block = 8 << 20
    objects.put("x", [b"\0" * block])
    script = (
        "import sys; from store.objects.local import LocalStore\n"
        "objects = LocalStore(sys.argv[1]); number = 0\n"
        "while True:\n"
        "    number = (number + 1) % 256; print(number, flush=True)\n"
        f"    objects.put('x', [bytes([number]) * {block}])\n"
    )
    for delay in (0.01, 0.03, 0.06, 0.1):
        writer = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        writer.kill()
        writer.wait(10)
        data = objects.get("x", max_bytes=block)
        assert len(data) == block
        assert len(set(data[:: 1 << 12])) == 1
    assert [info.name for info in objects.list("")] == ["x"]


def test_hidden_files_are_no_objects(tmp_path):
    objects = LocalStore(tmp_path)
    objects.put("a/x", [b"x"])
    (tmp_path / "a" / ".DS_Store").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    assert [info.name for info in objects.list("")] == ["a/x"]


def test_a_file_where_a_folder_should_be(tmp_path):
    objects = LocalStore(tmp_path)
    objects.put("a", [b"x"])
    with pytest.raises(StoreError):
        objects.put("a/b", [b"y"])
    with pytest.raises(ObjectNotFound):
        objects.get("a/b", max_bytes=1)
