"""Folders below a root that are folders, and no links that lead out of it.

A run may have been copied from anyone: a link in it may point at any folder of this machine, and
what is put, read or deleted through it would not be the run's. So every folder between the root
and an object is looked at before it is gone through; the root itself may be a link, for whoever
names it chose it. Of a folder that was seen it is enough that its path leads to the same inode as
then (one `stat`, a microsecond or two of the 33 that a put takes in memory): with any part of it
exchanged for a link, it would not. Deleting goes from descriptor to descriptor, so that not even a
folder exchanged in that moment leads it elsewhere. Knows paths; never knows what lies in them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from store.errors import NotAFile

FOLDERS_REMEMBERED = 4096
"""A run of a million units has more folders than a process's memory should hold names."""

_TRIES = 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def refuse_link(path: str) -> NotAFile:
    """Return the error for a link inside of a run."""
    return NotAFile(
        f"{path} is a symbolic link: nothing of a run is read, written or deleted through links; "
        "put what it points to in its place"
    )


class RealFolders:
    """Which folders below a root were seen to be real ones; remembers those seen last."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._seen: dict[str, tuple[int, int]] = {}

    def __contains__(self, folder: str) -> bool:
        return folder in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def forget(self, folder: str) -> None:
        """Look again at a folder that may be gone."""
        self._seen.pop(folder, None)

    def make(self, folder: str) -> None:
        """Make a folder and those above it, gc's removals meanwhile notwithstanding.

        Raises `NotAFile` at a link, before anything is made behind it.
        """
        for _ in range(_TRIES):
            try:
                self._make(folder)
                return
            except FileNotFoundError as error:
                # One that was seen is gone.
                self._seen.clear()
                missing = error
        raise missing

    def _make(self, folder: str) -> None:
        if self._is_as_seen(folder):
            return
        if self._root not in self._seen:
            os.makedirs(self._root, exist_ok=True)
            self._remember(self._root, os.stat(self._root))
        for part in _below(self._root, folder):
            if part not in self._seen:
                with suppress(FileExistsError):
                    os.mkdir(part)
            self._look_at(part)

    def check(self, folder: str) -> None:
        """Raise `NotAFile` where a part of `folder` below the root is a link.

        Raises `FileNotFoundError` or `NotADirectoryError` where there is no such folder.
        """
        if folder == self._root or self._is_as_seen(folder):
            return
        for part in _below(self._root, folder):
            self._look_at(part)

    def _is_as_seen(self, folder: str) -> bool:
        seen = self._seen.get(folder)
        if seen is None:
            return False
        try:
            found = os.stat(folder)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == seen

    def _look_at(self, folder: str) -> None:
        found = os.lstat(folder)
        mode = found.st_mode
        if stat.S_ISLNK(mode):
            raise refuse_link(folder)
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
        self._remember(folder, found)

    def _remember(self, folder: str, found: os.stat_result) -> None:
        if folder not in self._seen and len(self._seen) >= FOLDERS_REMEMBERED:
            self._seen.clear()
        self._seen[folder] = found.st_dev, found.st_ino


@contextmanager
def opened_folder(root: str, folder: str) -> Iterator[int]:
    """Give the descriptor of a folder reached from the root through no link.

    Raises `FileNotFoundError` where there is none, `NotAFile` at a link.
    """
    descriptor = os.open(root, _FOLDER)
    try:
        for part in _below(root, folder):
            name = os.path.basename(part)
            try:
                inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EMLINK) and os.path.islink(
                    part
                ):
                    raise refuse_link(part) from error
                raise
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _below(root: str, folder: str) -> Iterator[str]:
    """Yield every folder on the way from the root, without it, to `folder`."""
    path = root
    for part in folder[len(root) :].split(os.sep):
        if part:
            path = os.path.join(path, part)
            yield path
