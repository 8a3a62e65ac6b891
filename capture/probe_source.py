"""A user's probe by its path: the function itself, and a fingerprint of the source it comes from.

The fingerprint covers the file of the module that the path names and that of the module which
defines the function, where it is another one (a package that only passes it on). It covers neither
what these modules import nor what they read when they run. Knows no tensors, so that a run's driver
can ask before any engine starts.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from capture.errors import ProbeError


def load_probe(path: str) -> Callable[..., Any]:
    """Return the function of `package.module:function`. Raises `ProbeError`."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ProbeError(
            f"capture.probe {path!r} cannot be imported ({error}); give it as "
            "package.module:function, of a module that driver and workers can import"
        ) from error
    if not callable(function):
        raise ProbeError(f"capture.probe {path!r} is not a function")
    return function


def probe_source(path: str) -> str:
    """Return a SHA-256 of the probe's source as it lies in its files now. Raises `ProbeError`."""
    function = load_probe(path)
    while isinstance(function, functools.partial):
        function = function.func
    named = path.partition(":")[0]
    defining = getattr(function, "__module__", None) or named
    digest = hashlib.sha256()
    for name in dict.fromkeys((named, defining)):
        module = sys.modules.get(name) or importlib.import_module(name)
        digest.update(f"{name}\0".encode())
        digest.update(_source_bytes(path, module))
    return digest.hexdigest()


def _source_bytes(path: str, module: ModuleType) -> bytes:
    """Return a module's source file; of one without (an extension module), what is loaded."""
    file = getattr(module, "__file__", None)
    try:
        if file is not None and Path(file).is_file():
            return Path(file).read_bytes()
        source = module.__loader__.get_source(module.__name__)  # type: ignore[union-attr]
    except (OSError, AttributeError, ImportError) as error:
        raise _without_source(path, module) from error
    if source is None:
        raise _without_source(path, module)
    return str(source).encode()


def _without_source(path: str, module: ModuleType) -> ProbeError:
    return ProbeError(
        f"capture.probe {path!r} comes from {module.__name__}, which has no source that the run "
        "could be held to; put the function in a module of your own"
    )
