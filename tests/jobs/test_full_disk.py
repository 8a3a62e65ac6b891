"""A disk that fills up in the middle of a run, and is enlarged: a real one, in memory.

Mounting needs root; where that is not allowed this file is not collected (`conftest.py`), and what
a full disk leads to is tested with a made-up error alone (`test_driver.py`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs.run_process import RunProcess, assert_complete, texts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.chaos
def test_a_full_disk_interrupts_the_run_and_more_room_lets_it_go_on(
    engine_config: Callable[..., Path], small_disk: Path
) -> None:
    config = engine_config(
        texts(150), output=str(small_disk / "run"), workers={"store_patience_seconds": 8}
    )
    with RunProcess(config) as run:
        assert run.finish() == 75, run.transcript()
        assert run.named("store failing")
        assert not run.named("unit failed")
        assert any("run the same command" in line for line in run.other)
    subprocess.run(["mount", "-o", "remount,size=256m", str(small_disk)], check=True)
    with RunProcess(config) as again:
        assert again.finish() == 0, again.transcript()
    assert_complete(small_disk / "run")
