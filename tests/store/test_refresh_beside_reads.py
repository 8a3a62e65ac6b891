"""A run that grows while some threads refresh it and others read: each call sees one state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from store import keys
from store.array_reader import ReadOptions
from store.commit import begin_repair
from store.errors import PromptNotStored
from store.gc import collect_garbage
from store.objects.local import LocalStore
from store.plan_writer import write_segment
from store.run import Run
from store.snapshot import write_snapshot
from tests.store.sample_run import (
    RUN_ID,
    SampleShape,
    capture,
    make_unit,
    plan_tables,
    write_manifests,
    write_run,
)

SHAPE = SampleShape(num_layers=1, num_heads=2, num_kv_heads=1, head_size=8)
LENGTHS = [5, 0, 3]
STEPS = 12


class Hooked:
    """A store that makes a call once, after it has answered for the first name with a prefix."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.after: tuple[str, Callable[[], None]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        return self._answered(name, self._inner.get(name, max_bytes=max_bytes))

    def list(self, prefix: str, *, after: str = "") -> Any:
        return iter(self._answered(prefix, list(self._inner.list(prefix, after=after))))

    def _answered(self, name: str, answer: Any) -> Any:
        if self.after is not None and name.startswith(self.after[0]):
            call, self.after = self.after[1], None
            call()
        return answer


class Remote(Hooked):
    """A store that is asked for several things at once, as one over a network is."""

    def __getattr__(self, name: str) -> Any:
        if name == "small_ranges_are_cheap":
            raise AttributeError(name)
        return super().__getattr__(name)


def grow(objects: Any, unit: int) -> None:
    """Add a segment of one unit, and commit that."""
    tables = plan_tables([LENGTHS] * (unit + 1))
    prompts = tables["prompts"].slice(unit * len(LENGTHS))
    units = tables["units"].slice(unit)
    write_segment(objects, run_id=RUN_ID, segment=unit, prompts=prompts, units=units)
    capture(objects, SHAPE, make_unit(SHAPE, unit, unit * len(LENGTHS), LENGTHS, seed=1))


def statuses(run: Run) -> list[str]:
    found: list[str] = run.prompts["status"].to_pylist()
    return found


@pytest.mark.parametrize("store", [Hooked, Remote])
def test_a_segment_that_comes_while_the_run_is_looked_at_is_no_contradiction(
    tmp_path, store: type[Hooked]
) -> None:
    objects = store(LocalStore(tmp_path))
    write_run(objects, SHAPE, [LENGTHS])
    run = Run(objects, ReadOptions())
    objects.after = (keys.PLAN if store is Hooked else "", lambda: grow(objects, 1))
    run.refresh()
    assert len(statuses(run)) in (3, 6)
    assert len(run.batches(["z"])) == 1
    assert len(statuses(run.refresh())) == 6


def test_a_prompts_table_made_beside_a_refresh_does_not_outlive_it(tmp_path) -> None:
    objects = Hooked(LocalStore(tmp_path))
    write_manifests(objects, SHAPE, [LENGTHS, LENGTHS])
    run = Run(objects, ReadOptions())

    def commit_and_refresh() -> None:
        capture(objects, SHAPE, make_unit(SHAPE, 1, 3, LENGTHS, seed=1))
        run.refresh()

    objects.after = ("plan/0000/prompts", commit_and_refresh)
    assert statuses(run) == ["pending"] * 6
    assert statuses(run) == ["pending"] * 3 + ["stored", "failed", "stored"]


def test_of_two_refreshes_the_younger_wins(tmp_path) -> None:
    objects = Hooked(LocalStore(tmp_path))
    write_run(objects, SHAPE, [LENGTHS])
    run = Run(objects, ReadOptions())
    other = threading.Thread(target=run.refresh, daemon=True)

    def grow_and_refresh() -> None:
        grow(objects, 1)
        other.start()
        other.join(0.2)

    objects.after = (keys.SNAPSHOTS, grow_and_refresh)
    run.refresh()
    other.join(60)
    assert len(statuses(run)) == 6


def test_a_stream_goes_on_with_what_it_was_made_of(tmp_path) -> None:
    objects = LocalStore(tmp_path)
    (unit,) = write_run(objects, SHAPE, [LENGTHS])
    run = Run(objects, ReadOptions())
    stream = run.batches(["z"], size=100)
    again = make_unit(SHAPE, 0, 0, [3, 2, 3], seed=8)
    assert capture(objects, SHAPE, again, "a1", repair=begin_repair(objects, 0)).won
    run.refresh()
    for _ in range(2):
        (batch,) = stream
        assert np.array_equal(batch.arrays["z"], unit.arrays["z"].swapaxes(0, 1))
    collect_garbage(objects, delete=True)
    with pytest.raises(OSError, match=r"data/00000000/a0"):
        list(stream)


@pytest.mark.parametrize("store", [Hooked, Remote])
def test_threads_that_read_and_refresh_a_growing_run_see_whole_states(
    tmp_path, store: type[Hooked]
) -> None:
    objects = LocalStore(tmp_path)
    write_manifests(objects, SHAPE, [LENGTHS])
    run = Run(store(objects), ReadOptions())
    ended = threading.Event()
    faults: list[Exception] = []
    counts = {"reads": 0, "refreshes": 0}

    def until_ended(name: str, work: Callable[[], None]) -> threading.Thread:
        def loop() -> None:
            try:
                while not ended.is_set():
                    work()
                    counts[name] += 1
            except Exception as error:  # noqa: BLE001 - it is raised by the test
                faults.append(error)
                ended.set()

        thread = threading.Thread(target=loop, name=name, daemon=True)
        thread.start()
        return thread

    def tables() -> None:
        table = run.prompts
        stored = pc.sum(pc.equal(table["status"], "stored")).as_py()
        failed = pc.sum(pc.equal(table["status"], "failed")).as_py()
        assert stored == 2 * failed
        assert len(run.sql("select prompt_id from prompts")) >= table.num_rows

    def streams() -> None:
        if not run.overview()["stored"]:
            return
        stream = run.batches(["z"], size=1000)
        rows = [len(batch.prompt) for batch in stream]
        assert sum(rows) % sum(LENGTHS) == 0
        scores = run.head_scores("entropy")
        assert scores.attrs["prompts"] % 2 == 0
        assert run.moments("z").attrs["rows"] % sum(LENGTHS) == 0

    def rows() -> None:
        last = run.prompts.num_rows - 3
        assert len(run.tokens(last)) == 5
        with suppress(PromptNotStored):
            assert run.read("z", prompt=last).sizes["pos"] == 5
            assert run.pattern(f"p{last}").sizes["key_pos"] == 5

    work = [("reads", tables), ("reads", streams), ("reads", rows)]
    work += [("refreshes", lambda: run.refresh() and None)] * 2
    threads = [until_ended(*one) for one in work]
    try:
        capture(objects, SHAPE, make_unit(SHAPE, 0, 0, LENGTHS, seed=1))
        for unit in range(1, STEPS):
            grow(objects, unit)
            if unit % 3 == 0:
                write_snapshot(objects, RUN_ID)
            if unit % 4 == 0:
                repair = begin_repair(objects, unit - 2)
                again = make_unit(SHAPE, unit - 2, (unit - 2) * 3, LENGTHS, seed=2)
                assert capture(objects, SHAPE, again, "a1", repair=repair).won
            done = counts["reads"] + 3
            while counts["reads"] < done and not ended.wait(0.001):
                pass
    finally:
        ended.set()
        for thread in threads:
            thread.join(120)
    if faults:
        raise faults[0]
    assert min(counts.values()) > 0
    assert statuses(run.refresh()) == ["stored", "failed", "stored"] * STEPS
