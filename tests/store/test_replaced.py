"""Units that are captured again beside open runs and verifications: nothing old, nothing mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from store import keys, open_run
from store.array_reader import ReadOptions
from store.commit import begin_repair, commit_unit
from store.errors import DamagedObject
from store.gc import collect_garbage
from store.objects.local import LocalStore
from store.run import Run
from store.snapshot import write_snapshot
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, capture, make_unit, write_run, write_unit

SHAPE = SampleShape()
LENGTHS = [[3, 5, 0, 1], [30, 7]]
KEY = keys.commit_key(0)


@pytest.mark.parametrize("looked_between", [False, True])
def test_a_commit_made_again_under_its_name_is_the_one_that_is_read(objects, looked_between):
    write_run(objects, SHAPE, LENGTHS)
    run = Run(objects, ReadOptions())
    old = run.batches(["z"], size=1000)
    assert run.prompts["status"].to_pylist()[:2] == ["stored", "stored"]
    run.read("z", prompt=0, layer=0)
    objects.delete(KEY)
    if looked_between:
        assert run.refresh().prompts["status"].to_pylist()[:2] == ["pending", "pending"]
    again = make_unit(SHAPE, 0, 0, [3, 0, 0, 1], seed=5)
    assert commit_unit(objects, write_unit(objects, SHAPE, again, "c0")).won
    run.refresh()
    assert run.prompts["status"].to_pylist()[:2] == ["stored", "failed"]
    read = run.read("z", prompt=0, layer=1).values
    assert np.array_equal(read.swapaxes(0, 1), again.arrays["z"][1, :3])
    assert run.moments("z").attrs["rows"] == 3 + 1 + 30 + 7
    assert sum(len(batch.prompt) for batch in run.batches(["z"])) == 3 + 1 + 30 + 7
    assert sum(len(batch.prompt) for batch in old) == 3 + 5 + 1 + 30 + 7


def test_a_refresh_reads_no_commit_twice(tmp_path):
    objects = Counting(LocalStore(tmp_path))
    write_run(objects, SHAPE, LENGTHS)
    run = Run(objects, ReadOptions())
    run.prompts, run.read("z", prompt=0, layer=0)
    objects.asked.clear()
    run.refresh().prompts, run.read("z", prompt=0, layer=1)
    assert [name for name in objects.asked if name.startswith(f"{keys.COMMITS}0")] == []


def test_a_run_opened_before_a_repair_says_to_refresh(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SHAPE, LENGTHS)
    run = open_run(objects.url)
    run.read("z", prompt=0, layer=0)
    repair(objects)
    collect_garbage(objects, delete=True)
    with pytest.raises(DamagedObject, match=r"unit 0 was captured again .* call refresh\(\)"):
        run.read("z", prompt=0, layer=1)
    with pytest.raises(DamagedObject, match=r"call refresh\(\)"):
        list(run.batches(["z"]))
    assert run.refresh().read("z", prompt=0, layer=1).sizes["pos"] == 3
    objects.delete("data/00000000/a1/z/c/1/0/0/0")
    with pytest.raises(DamagedObject, match="run `attnstore verify`"):
        open_run(objects.url).read("z", prompt=0, layer=1)


def repair(objects: Any) -> None:
    again = make_unit(SHAPE, 0, 0, LENGTHS[0], seed=9)
    assert capture(objects, SHAPE, again, "a1", repair=begin_repair(objects, 0)).won


class Counting:
    """A store that notes what is asked of it, and makes a call before it answers for a name."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.asked: list[str] = []
        self.before: tuple[str, Callable[[], None]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        self._note(name)
        found: bytes = self._inner.get(name, max_bytes=max_bytes)
        return found

    def list(self, prefix: str, *, after: str = "") -> Any:
        self._note(prefix)
        return self._inner.list(prefix, after=after)

    def _note(self, name: str) -> None:
        self.asked.append(name)
        if self.before is not None and name.startswith(self.before[0]):
            call, self.before = self.before[1], None
            call()


@pytest.mark.parametrize(
    "name", ["data/00000000/a0/", "data/00000000/a0/z/c/1", "commits/000000/00000001"]
)
def test_a_verification_beside_a_repair_and_gc_finds_no_damage(tmp_path, name):
    objects = Counting(LocalStore(tmp_path))
    write_run(objects, SHAPE, LENGTHS)
    plain = LocalStore(tmp_path)

    def repair_and_collect() -> None:
        repair(plain)
        assert collect_garbage(plain, delete=True).garbage

    objects.before = (name, repair_and_collect)
    assert verify_run(objects, deep=True, threads=1).problems == []
    assert objects.before is None


def test_a_verification_beside_a_gc_of_snapshots_finds_no_damage(tmp_path):
    objects = Counting(LocalStore(tmp_path))
    write_run(objects, SHAPE, LENGTHS)
    plain = LocalStore(tmp_path)
    for _ in range(3):
        write_snapshot(plain, RUN_ID)
    objects.before = ("snapshots/00000000", lambda: collect_garbage(plain, delete=True) and None)
    assert verify_run(objects, deep=True).problems == []
    assert objects.before is None


def test_a_snapshot_loses_its_manifest_first(tmp_path):
    objects = LocalStore(tmp_path)
    write_run(objects, SHAPE, LENGTHS)
    for _ in range(3):
        write_snapshot(objects, RUN_ID)
    for one in collect_garbage(objects).garbage:
        assert one.names(objects)[0].endswith("/manifest.json")


def test_a_verification_beside_a_saved_summary_finds_no_damage(tmp_path):
    objects = Counting(LocalStore(tmp_path))
    write_run(objects, SHAPE, LENGTHS)
    run = open_run(str(tmp_path))
    table = run.prompts.select(["prompt_id", "num_tokens"])
    run.save_summary("s", table)
    objects.before = ("summaries/s.json", lambda: run.save_summary("s", table.slice(1)))
    assert verify_run(objects, deep=True).problems == []
    assert objects.before is None
