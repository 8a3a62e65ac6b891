"""Which errors, raised while a store was used, say that the store is in trouble."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from capture.errors import CaptureStalled, ProbeError
from store.errors import (
    CannotList,
    CommitRefused,
    DamagedObject,
    NotAFile,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreNotAtomic,
    StoreRefused,
    is_outage,
    is_store_trouble,
)
from store.objects.local import LocalStore


def with_errno(error: StoreError, number: int) -> StoreError:
    error.errno = number
    return error


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (StoreError("put of data/x failed"), True),
        (StoreRefused("credentials that have expired"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), True),
        (with_errno(StoreError("full"), errno.ENOSPC), True),
        (with_errno(StoreError("no leave"), errno.EACCES), True),
        (with_errno(StoreError("a name too long"), errno.ENAMETOOLONG), False),
        (with_errno(StoreError("a folder is there"), errno.EISDIR), False),
        (NotAFile("a link"), False),
        (ObjectExists("there"), False),
        (ObjectNotFound("not there"), False),
        (CannotList("a web server"), False),
        (StoreNotAtomic("two won"), False),
        (DamagedObject("cut short"), False),
        (CommitRefused("3 problems, one quotes StoreError: No space left on device"), False),
        (RuntimeError("StoreError: Connection refused"), False),
        (ProbeError("store.errors.StoreError: gone"), False),
        (CaptureStalled("after 60 s"), False),
        (OSError("no errno"), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
    ],
)
def test_each_error_by_its_type(error: Exception, trouble: bool) -> None:
    assert is_store_trouble(error) is trouble


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (StoreError("503"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (with_errno(StoreError("full"), errno.ENOSPC), True),
        (StoreRefused("not allowed"), False),
        (with_errno(StoreError("no leave"), errno.EACCES), False),
        (with_errno(StoreError("a file is in the way"), errno.ENOTDIR), False),
        (ObjectNotFound("not there"), False),
        (DamagedObject("cut short"), False),
    ],
)
def test_an_outage_may_end_by_itself(error: Exception, outage: bool) -> None:
    assert is_outage(error) is outage


def test_an_error_that_is_caused_by_a_failing_store_is_judged_by_itself() -> None:
    last = ValueError("what follows")
    last.__cause__ = StoreError("gone")
    assert not is_store_trouble(last)


def put_under_a_file(objects: LocalStore, root: Path) -> None:
    (root / "data").mkdir()
    (root / "data" / "00000003").write_bytes(b"")
    objects.put("data/00000003/a0/x", [b"1"])


def put_through_a_link(objects: LocalStore, root: Path) -> None:
    (root / "elsewhere").mkdir()
    (root / "data").symlink_to(root / "elsewhere")
    objects.put("data/00000003/a0/x", [b"1"])


def put_in_place_of_a_folder(objects: LocalStore, root: Path) -> None:
    (root / "data" / "x").mkdir(parents=True)
    objects.put("data/x", [b"1"])


@pytest.mark.parametrize("put", [put_under_a_file, put_through_a_link, put_in_place_of_a_folder])
def test_what_stands_in_the_way_of_one_object_is_no_trouble_of_the_store(
    tmp_path: Path, put: Callable[[LocalStore, Path], None]
) -> None:
    with pytest.raises(StoreError, match="data") as raised:
        put(LocalStore(tmp_path), tmp_path)
    assert not is_store_trouble(raised.value)


def test_a_folder_that_cannot_be_written_is_trouble(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_bytes(b"")
    with pytest.raises(OSError, match="a file") as raised:
        LocalStore(file / "run").put("x", [b"1"])
    assert is_store_trouble(raised.value)
