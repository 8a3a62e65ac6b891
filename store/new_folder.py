"""Folders that stay only if what fills them succeeds. Knows nothing of what that is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def new_folder(target: Path) -> Iterator[None]:
    """Make a folder and its missing parents; take away what was made where the body fails.

    Raises `FileExistsError` if `target` is there.
    """
    with new_parents(target):
        target.mkdir()
        try:
            yield
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise


@contextmanager
def new_parents(target: Path) -> Iterator[None]:
    """Make the missing parents of a path; take away those made where the body fails.

    Those that hold something else by then stay.
    """
    missing = [folder for folder in target.parents if not folder.exists()]
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            with suppress(FileExistsError):  # Another was quicker: not ours to take away.
                folder.mkdir()
                made.insert(0, folder)
        yield
    except BaseException:
        _remove_empty(made)
        raise


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove these folders, the deepest first, but for those that hold something."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
