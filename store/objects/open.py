"""From a URL or a path to the back end that serves it.

Options (credentials, endpoints, time-outs) come from the caller or the environment and are never
stored in a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from store.objects.fsspec_store import FsspecStore
from store.objects.local import LocalStore
from store.objects.obstore_store import SCHEMES, ObstoreStore
from store.objects.protocol import ObjectStore


def open_store(
    url: str | os.PathLike[str], options: Mapping[str, Any] | None = None
) -> ObjectStore:
    """Return the object store rooted at `url`: a local path or any URL. Opens no connection yet.

    A URL that no back end serves raises `StoreError` at the first use.
    """
    text = os.fspath(url)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme == "":
        return LocalStore(Path(text).expanduser())
    if scheme == "file":
        return LocalStore(unquote(urlsplit(text).path))
    if scheme in SCHEMES and "::" not in text:
        return ObstoreStore(text, options)
    return FsspecStore(text, options)
