"""Every error a run can raise, in one family; each is also the builtin a caller would expect.

A message says what happened with its values, then what to do next.
"""

from __future__ import annotations

import errno


class RunError(Exception):
    """Something about a run is not as it must be."""


class RunNotFound(RunError, FileNotFoundError):
    """There is no run at this location."""


class UnitNotFound(RunError, LookupError):
    """The plan has no such unit."""


class PromptNotFound(RunError, LookupError):
    """The plan has no such prompt."""


class PromptNotStored(RunError, LookupError):
    """The prompt is planned, but its rows are not in the run (pending, failed or skipped)."""


class SiteNotFound(RunError, LookupError):
    """The run holds no such site, layer or head."""


class NothingToReduce(RunError, ValueError):
    """No stored prompt matches what was asked for, so there is nothing to take the mean of."""


class SelectionError(RunError, IndexError):
    """A selection lies outside what the run holds."""


class FormatError(RunError, ValueError):
    """An object of the run does not follow the format, or follows a newer one."""


class UnsafeName(FormatError):
    """A name in a run's metadata would point outside the run."""


class DamagedObject(RunError, OSError):
    """An object is missing, cut short, or its bytes do not match their checksum."""


class FrozenFieldChanged(RunError, ValueError):
    """A run was resumed with a setting that its data depends on changed."""


class CommitRefused(RunError, RuntimeError):
    """An attempt's data is not complete and exact, so it must not become part of the run."""


class QueryRefused(RunError, ValueError):
    """A query does not parse, names what is not there, or reaches outside its tables."""


class ExportRefused(RunError, ValueError):
    """An export of this kind, or to this place, cannot be made."""


class PackageMissing(RunError, ImportError):
    """This needs a package that is not installed."""


class StoreError(OSError):
    """An object store did not do what was asked."""


class StoreRefused(StoreError):
    """A store serves this only when somebody changes something: no permission, no such bucket."""


class ObjectNotFound(StoreError, FileNotFoundError):
    """There is no object of this name."""


class ObjectExists(StoreError, FileExistsError):
    """A create-only put met an object that is already there."""


class NotAFile(DamagedObject, StoreError):
    """A link or a pipe stands in a run where a file or a folder should: it is not followed."""


class CannotList(StoreError):
    """This back end serves objects by name only (a plain web server)."""


class StoreNotAtomic(StoreError):
    """This back end lets two writers both win a create-only put."""


_ABOUT_ONE_NAME = (ObjectNotFound, ObjectExists, NotAFile, CannotList, StoreNotAtomic)

_OF_ONE_NAME = frozenset({errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG, errno.EFBIG})

_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST})

_TROUBLE = frozenset(
    getattr(errno, name)
    for name in (
        "ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE", "ECONNREFUSED", "ECONNRESET",
        "ECONNABORTED", "EPIPE", "ETIMEDOUT", "EHOSTUNREACH", "EHOSTDOWN", "ENETUNREACH",
        "ENETDOWN",
    )
)  # fmt: skip


def is_outage(error: BaseException) -> bool:
    """Return whether a store that was used just now may work again if it is left alone."""
    refused = isinstance(error, StoreRefused) or getattr(error, "errno", None) in _NOT_ALLOWED
    return is_store_trouble(error) and not refused


def is_store_trouble(error: BaseException) -> bool:
    """Return whether what was raised *while a store was used* says that the store is in trouble.

    So is every `StoreError` but those that say what there is under a name, or why one object cannot
    be put there, or what a back end cannot do at all; and an operating system's error of a full,
    broken or unreachable place. Goes by type and errno, never by text, which may quote anything.
    """
    if isinstance(error, StoreError):
        return not isinstance(error, _ABOUT_ONE_NAME) and error.errno not in _OF_ONE_NAME
    family = isinstance(error, RunError)
    return isinstance(error, OSError) and not family and error.errno in _TROUBLE
