"""What reads cost: planned and counted against a store, at a real model's head size."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from store.array_reader import ReadOptions
from store.codec import Codec
from store.explain import ReadCost
from store.objects.local import LocalStore
from store.prompt_blocks import BlockReader, choose
from store.read_plan import ChunkLayout, CostModel, coalesce, plan_chunks
from store.run import Run, open_run
from tests.store.sample_run import SampleShape, array_record, write_run

LENGTHS = [[200, 100, 900], [30]]


class CountingStore(LocalStore):
    """A local store that counts like an object store, whose small ranges are not cheap."""

    small_ranges_are_cheap = False

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.calls: list[tuple[str, list[int]]] = []

    def get_ranges(self, name, ranges):
        if "/c/" in name:
            self.calls.append((name, [r.length for r in ranges]))
        return super().get_ranges(name, ranges)

    def cost(self) -> tuple[int, int, int]:
        lengths = [length for _, call in self.calls for length in call]
        return len(self.calls), len(lengths), sum(lengths)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 8 heads over 2 kv heads of size 128 in bfloat16, like one rank of a real one."""
    path = tmp_path_factory.mktemp("planned")
    shape = SampleShape(
        num_layers=2, num_heads=8, num_kv_heads=2, head_size=128, dtype="bfloat16",
        max_shard_bytes=64 << 20, sites=("rot_q", "rot_k", "z"),
    )  # fmt: skip
    write_run(LocalStore(path), shape, LENGTHS)
    return path


@pytest.fixture
def run(folder) -> Run:
    return Run(CountingStore(folder), ReadOptions())


def counted(run: Run) -> CountingStore:
    objects: Any = run._objects
    objects.calls.clear()
    return objects


@pytest.mark.parametrize("start", [0, 100, 30])
def test_one_head_and_64_positions_are_one_small_request(run: Run, start: int) -> None:
    """p1 starts at row 200, so from position 30 on its 64 rows cross a chunk's edge at 256."""
    pick: dict[str, Any] = {"layer": 1, "head": 5, "pos": slice(start, start + 64)}
    prompt = "p1" if start == 30 else "p2"
    cost = run.explain("z", prompt=prompt, **pick)
    objects = counted(run)
    run.read("z", prompt=prompt, **pick)
    assert objects.cost() == (cost.calls, cost.requests, cost.bytes)
    assert (cost.calls, cost.requests) == (1, 1)
    assert cost.bytes <= 750_000
    assert cost.chunks == (2 if start == 30 else 1)


def test_a_whole_layer_of_a_prompt_is_one_call(run: Run) -> None:
    cost = run.explain("z", prompt="p2", layer=0)
    objects = counted(run)
    run.read("z", prompt="p2", layer=0)
    assert objects.cost() == (cost.calls, cost.requests, cost.bytes)
    assert cost.calls == 1
    assert cost.requests == 2  # one for each of the two head groups


def test_one_head_over_a_whole_unit_is_one_range_a_layer(run: Run) -> None:
    cost = run.explain("z", prompt=["p0", "p1", "p2"], head=7)
    objects = counted(run)
    reader = BlockReader(run._index, run._arrays, "z", None, 7)
    chosen = choose(run._index, ["p0", "p1", "p2"], block_rows=1 << 40)
    assert len(chosen.blocks) == 1
    reader.read(chosen.blocks[0])
    assert objects.cost() == (cost.calls, cost.requests, cost.bytes)
    assert (cost.calls, cost.requests) == (2, 2)
    assert cost.amplification < 4.5  # the group's four heads come together, and the last chunk


def test_reading_again_costs_nothing(run: Run) -> None:
    run.read("z", prompt="p1", layer=0, head=0)
    objects = counted(run)
    run.read("z", prompt="p1", layer=0, head=[1, 2], pos=slice(0, 10))
    assert objects.calls == []


def test_a_pattern_costs_its_queries_and_the_keys_they_see(run: Run) -> None:
    cost = run.explain("pattern", prompt="p2", layer=1, head=0, pos=slice(0, 32))
    objects = counted(run)
    run.pattern("p2", 1, 0, query=slice(0, 32))
    assert objects.cost() == (cost.calls, cost.requests, cost.bytes)
    assert cost.calls == 2
    assert "requests" in str(cost)


@pytest.mark.parametrize(("request_bytes", "ranges"), [(0, 3), (1 << 20, 1)])
def test_ranges_join_by_the_cost_model(request_bytes: int, ranges: int) -> None:
    shape = SampleShape(num_heads=8, head_size=128, dtype="bfloat16", max_shard_bytes=64 << 20)
    layout = ChunkLayout(array_record(shape, "z", shape.geometry("z", 600), {}))
    chunks = plan_chunks(layout, np.array([0]), np.array([0, 7]), np.array([0, 599]))
    reads = coalesce(chunks, CostModel(request_bytes))
    assert [len(read.ranges) for read in reads] == [ranges]
    assert sum(len(part.chunks) for part in reads[0].ranges) == 4
    for part in reads[0].ranges:
        assert part.range.start == part.chunks[0].start
        assert part.range.start + part.range.length == part.chunks[-1].stop


def test_a_reader_that_joins_gaps_reads_the_same_values(folder) -> None:
    plain = open_run(str(folder))
    joined = open_run(str(folder), reading=ReadOptions(cost=CostModel(4 << 20), cache_bytes=0))
    pick: dict[str, Any] = {"prompt": "p2", "head": [0, 7], "pos": [0, 899], "dtype": "float32"}
    assert joined.read("z", **pick).identical(plain.read("z", **pick))


def test_indices_outside_the_array_are_an_error() -> None:
    shape = SampleShape(codec=Codec.RAW)
    layout = ChunkLayout(array_record(shape, "z", shape.geometry("z", 10), {}))
    with pytest.raises(IndexError, match="row indices"):
        plan_chunks(layout, np.array([0]), np.array([0]), np.array([10]))
    with pytest.raises(IndexError, match="head indices"):
        plan_chunks(layout, np.array([0]), np.array([-1]), np.array([0]))


def test_costs_add_up() -> None:
    one = ReadCost(1, 2, 3, 40, 20)
    assert ReadCost.total([one, one]) == ReadCost(2, 4, 6, 80, 40)
    assert one.amplification == 2
    assert ReadCost.total([]).amplification == 0


def test_the_byte_bound_holds_while_many_objects_are_read(folder) -> None:
    class Slow(LocalStore):
        small_ranges_are_cheap = False
        lock = threading.Lock()
        in_flight = most = calls = 0

        def get_ranges(self, name, ranges):
            count = sum(r.length for r in ranges)
            with self.lock:
                self.in_flight += count
                self.calls += 1
                self.most = max(self.most, self.in_flight)
            time.sleep(0.02)
            answer = super().get_ranges(name, ranges)
            with self.lock:
                self.in_flight -= count
            return answer

    objects = Slow(folder)
    one_layer = open_run(str(folder)).explain("z", prompt="p2", layer=0).bytes
    run = Run(objects, ReadOptions(max_in_flight_bytes=one_layer, threads=4))
    assert run.read("z", prompt="p2").shape == (2, 8, 900, 128)
    assert objects.calls == 2
    assert objects.most == one_layer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0),
        ("threads", 1.5),
        ("max_in_flight_bytes", -1),
        ("max_in_flight_bytes", 0),
        ("cache_bytes", -1),
        ("cache_bytes", None),
        ("deadline_seconds", 0),
        ("deadline_seconds", -1.0),
        ("deadline_seconds", float("nan")),
    ],
)
def test_options_that_no_read_could_meet_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        ReadOptions(**{name: value})
