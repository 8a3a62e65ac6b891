"""The benchmark's run folder: what it sees of writing, and what it lets lie there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.run_folder import RunFolder
from store import keys


def write_unit(folder: Path, unit: int, num_bytes: int) -> Path:
    path = folder / keys.DATA / keys.unit_name(unit)
    path.mkdir(parents=True)
    (path / "shard").write_bytes(bytes(num_bytes))
    return path


def wait_until(happened) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run"


def test_the_oldest_committed_units_go_first(folder):
    watched = RunFolder(folder, keep_bytes=250)
    paths = [write_unit(folder, unit, 100) for unit in range(5)]
    for unit in range(5):
        watched.committed(unit, 100)
    wait_until(lambda: watched.deleted_bytes == 300)
    assert [path.exists() for path in paths] == [False, False, False, True, True]
    watched.close()
    assert not folder.exists()


def test_everything_stays_where_no_bound_is_set(folder):
    watched = RunFolder(folder, keep_bytes=None)
    path = write_unit(folder, 0, 100)
    watched.committed(0, 100)
    watched.committed(1, 1 << 40)
    assert path.exists()
    assert watched.deleted_bytes == 0
    watched.close()


def test_the_first_write_is_the_first_file(folder):
    watched = RunFolder(folder, keep_bytes=None)
    folder.mkdir()
    (folder / "data").mkdir()
    before = time.perf_counter()
    write_unit(folder, 0, 1)
    wait_until(lambda: watched.first_write is not None)
    assert watched.first_write > before
    watched.close()


def test_a_unit_beyond_the_bound_does_not_wait_for_itself(folder):
    watched = RunFolder(folder, keep_bytes=0)
    write_unit(folder, 0, 10)
    watched.committed(0, 10)
    wait_until(lambda: watched.deleted_bytes == 10)
    watched.close()
