"""Which errors, raised while a store was used, say that the store is in trouble."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from capture.errors import CaptureStalled, ProbeError
from store.errors import (
    CannotList,
    CommitRefused,
    DamagedObject,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreNotAtomic,
    is_store_trouble,
)
from store.objects.local import LocalStore


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (StoreError("put of data/x failed"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), True),
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


def test_an_error_that_is_caused_by_a_failing_store_is_judged_by_itself() -> None:
    last = ValueError("what follows")
    last.__cause__ = StoreError("gone")
    assert not is_store_trouble(last)


def test_a_folder_that_cannot_be_written_is_trouble(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_bytes(b"")
    with pytest.raises(OSError, match="a file") as raised:
        LocalStore(file / "run").put("x", [b"1"])
    assert is_store_trouble(raised.value)
