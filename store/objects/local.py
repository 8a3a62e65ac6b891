"""Objects as files under a folder, durable and atomic by the file system's own rules.

A put writes a temporary file in the same file system, flushes it, and renames it into place; a
create links it into place, which fails if the name is taken, so exactly one of any racing writers
wins. Folders are flushed by `create` at once and for plain puts by `sync`, once a unit instead of
once an object. Temporary files live in `.tmp/`, whose name no object can have. A process that is
killed leaves its temporary file there and nothing else.

Nothing below the root is reached through a link (`store.objects.real_folders`), and nothing but a
regular file is read: a link or a pipe is listed under its name and can be deleted, no more.

It never knows what the objects mean.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import Buffer

from store.errors import (
    DamagedObject,
    NotAFile,
    ObjectExists,
    ObjectNotFound,
    RunError,
    StoreError,
    StoreRefused,
)
from store.keys import checked_name
from store.objects.protocol import ByteRange, ObjectInfo
from store.objects.real_folders import RealFolders, opened_folder, refuse_link

TEMPORARY_FOLDER = ".tmp"
_FOLDER_TRIES = 20
_SYNC_THREADS = 8
_MAX_GATHERED = min(os.sysconf("SC_IOV_MAX"), 1024)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A pipe opened so never waits for its other end."""
_GATHERED_BYTES = 1 << 18
"""Buffers of so much go into one call: fewer bytes than a core's cache keeps, many for a call."""


class LocalStore:
    """An `ObjectStore` over a local folder. Writers in any number of processes may share it."""

    small_ranges_are_cheap = True
    """Many ranges of a few bytes cost microseconds each; readers may ask for them to prove more."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._folders = RealFolders(self._root)

    @property
    def url(self) -> str:
        return self._root

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        """Write `parts` without copying them together, flush, and rename into place."""
        path = self._path(name)
        with self._reported(name):
            temporary = self._write_temporary(parts)
            try:
                self._in_folder_of(path, lambda: os.replace(temporary, path))
            except BaseException:
                _remove_quietly(temporary)
                raise

    def create(self, name: str, data: Buffer) -> None:
        """Write, flush, link without replacing, and flush every folder on the way. Atomic.

        Needs a file system with hard links, as all that a run should be kept on have.
        """
        path = self._path(name)
        with self._reported(name):
            temporary = self._write_temporary([data])
            try:
                self._in_folder_of(path, lambda: os.link(temporary, path))
            except FileExistsError as error:
                # Over NFS a link whose answer was lost is tried again and meets itself.
                if os.stat(temporary).st_nlink < 2:
                    raise ObjectExists(f"{self._root}: {name} is already there") from error
            finally:
                _remove_quietly(temporary)
            self._sync_folders_down_to(os.path.dirname(path))

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Return the whole file, its size checked before anything is read."""
        with self._opened(name) as (descriptor, size):
            if size > max_bytes:
                raise StoreRefused(
                    f"{self._root}: {name} has {size} bytes, {max_bytes} are allowed"
                )
            return _read_exactly(descriptor, ByteRange(0, size), name)

    def get_ranges(self, name: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return each range, read one after the other from one open file."""
        with self._opened(name) as (descriptor, size):
            found = []
            for wanted in ranges:
                if wanted.start < 0 or wanted.length < 0 or wanted.start + wanted.length > size:
                    raise DamagedObject(
                        f"{self._root}: {name} has {size} bytes, too few for {wanted.length} "
                        f"bytes from {wanted.start}; run `attnstore verify`"
                    )
                data = os.pread(descriptor, wanted.length, wanted.start)
                whole = len(data) == wanted.length
                found.append(data if whole else _read_exactly(descriptor, wanted, name))
            return found

    def size(self, name: str) -> int:
        """Return the file's size."""
        with self._reported(name):
            path = self._path(name)
            self._folders.check(os.path.dirname(path))
            found = os.lstat(path)
            self._require_file(name, found.st_mode)
            return found.st_size

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the files below a folder; folders that sort wholly below `after` stay unopened."""
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"a prefix is a folder ending in a slash, got {prefix!r}")
        folder = self._path(prefix[:-1]) if prefix else self._root
        with self._reported(prefix), suppress(FileNotFoundError, NotADirectoryError):
            self._folders.check(folder)
            yield from _walk(folder, prefix, after)

    def delete(self, name: str) -> None:
        """Remove the file, and the folders that this leaves empty below the root."""
        path = self._path(name)
        folder = os.path.dirname(path)
        with (
            self._reported(name),
            suppress(FileNotFoundError, NotADirectoryError),
            opened_folder(self._root, folder) as descriptor,
        ):
            os.unlink(os.path.basename(path), dir_fd=descriptor)
        while len(folder) > len(self._root):
            try:
                os.rmdir(folder)
            except OSError:
                return
            self._folders.forget(folder)
            folder = os.path.dirname(folder)

    def sync(self, prefix: str) -> None:
        """Flush every folder from the root through `prefix` and all below it."""
        folder = self._path(prefix.rstrip("/")) if prefix else self._root
        if not os.path.isdir(folder):
            return
        with self._reported(prefix):
            self._folders.check(folder)
            below = [path for path, _, _ in os.walk(folder)]
            # A disk flushes for many at once as fast as for one, and a unit has hundreds.
            with ThreadPoolExecutor(_SYNC_THREADS) as pool:
                for _ in pool.map(_sync_folder_if_there, below):
                    pass
            self._sync_folders_down_to(folder)

    def no_files(self) -> Iterator[str]:
        """Yield the names of links, pipes and devices: what no object and no folder of a run is."""
        with self._reported(""):
            yield from _no_files(self._root, "")

    def stale_temporaries(self, before: float, *, delete: bool = False) -> int:
        """Count temporary files not written to since `before` (seconds since 1970); may delete."""
        found = 0
        folder = os.path.join(self._root, TEMPORARY_FOLDER)
        with (
            self._reported(TEMPORARY_FOLDER),
            suppress(FileNotFoundError),
            opened_folder(self._root, folder) as descriptor,
            os.scandir(descriptor) as entries,
        ):
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_mtime < before:
                    found += 1
                    if delete:
                        with suppress(OSError):
                            os.unlink(entry.name, dir_fd=descriptor)
        return found

    def _path(self, name: str) -> str:
        return os.path.join(self._root, checked_name(name))

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """Turn the operating system's errors into the store's, with their errno."""
        try:
            yield
        except (StoreError, RunError):
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectNotFound(f"{self._root}: there is no {name}") from error
        except OSError as error:
            failure = StoreError(f"{self._root}: {name}: {error.strerror or error}")
            failure.errno = error.errno
            raise failure from error

    def _require_file(self, name: str, mode: int) -> None:
        if stat.S_ISLNK(mode):
            raise refuse_link(self._path(name))
        if stat.S_ISDIR(mode):
            raise ObjectNotFound(f"{self._root}: {name} is a folder, not an object")
        if not stat.S_ISREG(mode):
            raise NotAFile(f"{self._root}: {name} is a pipe or a device, not a file; delete it")

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        with self._reported(name):
            path = self._path(name)
            self._folders.check(os.path.dirname(path))
            try:
                descriptor = os.open(path, _READ)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EMLINK):
                    raise refuse_link(path) from error
                raise
            try:
                found = os.fstat(descriptor)
                self._require_file(name, found.st_mode)
                yield descriptor, found.st_size
            finally:
                os.close(descriptor)

    def _in_folder_of(self, path: str, place: Callable[[], None]) -> None:
        """Make the folder of `path` and act in it; again if someone removes it in between.

        A folder made before may be gone: gc removes those it empties.
        """
        folder = os.path.dirname(path)
        for _ in range(_FOLDER_TRIES):
            self._make_folder(folder)
            try:
                place()
                return
            except FileNotFoundError:
                self._folders.forget(folder)
        raise StoreError(f"{folder} is removed again and again while it is written to")

    def _make_folder(self, folder: str) -> None:
        try:
            self._folders.make(folder)
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            if isinstance(error, NotADirectoryError) and os.path.isdir(self._root):
                raise NotAFile(
                    f"{error.filename} is no folder, as is due there; delete it"
                ) from error
            failure = StoreError(f"cannot make the folder {folder}: {error.strerror}")
            failure.errno = error.errno
            raise failure from error

    def _write_temporary(self, parts: Iterable[Buffer]) -> str:
        folder = os.path.join(self._root, TEMPORARY_FOLDER)
        path = os.path.join(folder, f"{os.getpid()}-{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        opened: list[int] = []
        self._in_folder_of(path, lambda: opened.append(os.open(path, flags, 0o666)))
        (descriptor,) = opened
        try:
            _write_gathered(descriptor, parts)
            os.fsync(descriptor)
        except BaseException:
            _remove_quietly(path)
            raise
        finally:
            os.close(descriptor)
        return path

    def _sync_folders_down_to(self, folder: str) -> None:
        while len(folder) >= len(self._root):
            _sync_folder(folder)
            folder = os.path.dirname(folder)
        _sync_folder(folder)


def _walk(folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    # A folder sorts by its name with the slash that follows it in its objects' names.
    names = {
        entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name: entry
        for entry in entries
    }
    for name in sorted(names):
        entry, whole = names[name], prefix + name
        if name.startswith(".") or (whole <= after and not after.startswith(whole)):
            continue
        if name.endswith("/"):
            yield from _walk(entry.path, whole, after)
        elif whole > after:
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                yield ObjectInfo(whole, found.st_size, f"{found.st_ino}-{found.st_mtime_ns}")


def _no_files(folder: str, prefix: str) -> Iterator[str]:
    with suppress(FileNotFoundError):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name.startswith(".") and (prefix or entry.name != TEMPORARY_FOLDER):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _no_files(entry.path, f"{prefix}{entry.name}/")
            elif not entry.is_file(follow_symlinks=False):
                yield prefix + entry.name


def _write_gathered(descriptor: int, parts: Iterable[Buffer]) -> None:
    """Write `parts` as they come, a few at a time: what a part's maker has read is still cached."""
    batch: list[memoryview] = []
    gathered = 0
    for part in parts:
        view = memoryview(part).cast("B")
        if view.nbytes:
            batch.append(view)
            gathered += view.nbytes
        if gathered >= _GATHERED_BYTES or len(batch) == _MAX_GATHERED:
            _write_all(descriptor, batch)
            batch, gathered = [], 0
    _write_all(descriptor, batch)


def _write_all(descriptor: int, batch: list[memoryview]) -> None:
    """Write at most IOV_MAX buffers, none empty; a short write is continued."""
    start = 0
    while start < len(batch):
        written = os.writev(descriptor, batch[start:])
        while start < len(batch) and written >= batch[start].nbytes:
            written -= batch[start].nbytes
            start += 1
        if written:
            batch[start] = batch[start][written:]


def _read_exactly(descriptor: int, wanted: ByteRange, name: str) -> bytes:
    data = os.pread(descriptor, wanted.length, wanted.start)
    if len(data) == wanted.length:
        return data
    pieces = [data]
    missing = wanted.length - len(data)
    while missing and pieces[-1]:
        pieces.append(os.pread(descriptor, missing, wanted.start + wanted.length - missing))
        missing -= len(pieces[-1])
    if missing:
        raise DamagedObject(
            f"{name} ends {missing} bytes before {wanted.start + wanted.length}; run `attnstore "
            "verify`"
        )
    return b"".join(pieces)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder_if_there(folder: str) -> None:
    with suppress(FileNotFoundError):
        _sync_folder(folder)


def _remove_quietly(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink(missing_ok=True)
