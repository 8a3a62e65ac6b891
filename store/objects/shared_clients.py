"""Clients of object stores, kept for the next store with the same address and options.

Making one costs more than a small read: it loads the machine's certificates, and its first request
opens a connection. Knows nothing of what clients do. A client is made again where anything differs
that it was made of: address, options, environment, process (clients do not survive a fork).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

MOST_KEPT = 32

_kept: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()
"""Key -> client and options, which stay alive so that no id in the key is used again."""
_lock = threading.Lock()


def shared_client(address: str, options: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Return the client of these options, made by `make` if none is kept; keeps the latest used."""
    key = (os.getpid(), address, _frozen(options), tuple(sorted(os.environ.items())))
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key][0]
    client = make()
    with _lock:
        client, _ = _kept.setdefault(key, (client, options))
        while len(_kept) > MOST_KEPT:
            _kept.popitem(last=False)
    return client


def _frozen(value: Any) -> Any:
    """Return a key that is equal only for equal plain values and for one and the same object."""
    if isinstance(value, Mapping):
        return tuple((name, _frozen(value[name])) for name in sorted(value))
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(_frozen, value))
    if value is None or isinstance(value, str | bytes | bool | int | float | timedelta):
        return (type(value).__name__, value)
    return ("object", id(value))
