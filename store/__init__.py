"""Durable arrays of a capture run, and back. Needs no torch, no GPU.

`open_run` is looked up when first asked for: a rank that only writes shards loads no xarray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store.run import Run, open_run

__all__ = ["Run", "open_run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import store.run

    return getattr(store.run, name)
