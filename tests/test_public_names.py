"""What a user imports is where the documents say, and costs nothing until it is used."""

from __future__ import annotations

import pytest

import store
from tests.test_imports import loaded_by


def test_open_run_comes_from_store() -> None:
    from store import Run, open_run
    from store.run import open_run as defined

    assert open_run is defined
    assert Run.__module__ == "store.run"
    with pytest.raises(AttributeError, match="no attribute 'open_rum'"):
        store.open_rum  # noqa: B018


def test_writing_alone_loads_no_xarray() -> None:
    assert "xarray" not in loaded_by("import store.shard")
