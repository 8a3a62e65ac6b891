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

from store.errors import StoreError
from store.objects.fsspec_store import FsspecStore
from store.objects.local import LocalStore
from store.objects.obstore_store import SCHEMES, ObstoreStore
from store.objects.protocol import ObjectStore


def open_store(
    url: str | os.PathLike[str], options: Mapping[str, Any] | None = None
) -> ObjectStore:
    """Return the object store rooted at `url`: a local path or any URL. Opens no connection yet.

    A URL that no back end serves raises `StoreError` at the first use; one with characters that a
    back end would drop, and so serve another run, raises it at once. A path is taken as it is.
    """
    text = os.fspath(url)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme == "":
        return LocalStore(Path(text).expanduser())
    if scheme == "file":
        _refuse_what_is_dropped(text)
        return LocalStore(unquote(urlsplit(text).path))
    if scheme in SCHEMES and "::" not in text:
        _refuse_what_is_dropped(text)
        return ObstoreStore(text, options)
    return FsspecStore(text, options)


def _refuse_what_is_dropped(url: str) -> None:
    """Raise `StoreError` where a part of the URL would be ignored or would turn into another path.

    A query stays with a web server's URL: it is sent with every request.
    """
    web = urlsplit(url).scheme in ("http", "https")
    rest = url.partition("://")[2]
    shown = url.partition("?")[0] if web else url
    for mark in "#" if web else "#?":
        if mark in rest:
            hint = "" if web else f"; write %{ord(mark):02X} for one in a name"
            raise StoreError(f"{shown}: what follows {mark!r} would be ignored{hint}")
    host, _, path = rest.partition("?")[0].partition("/")
    if url.startswith("file:") and host not in ("", "localhost"):
        raise StoreError(f"{url}: {host!r} would be ignored; write file:///{rest}")
    for segment in path.split("/"):
        name = unquote(segment)
        if name in (".", "..") or ("/" in name and not web):
            raise StoreError(
                f"{shown}: {segment!r} would turn into another path; write the path that is meant"
            )
