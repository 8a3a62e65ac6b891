"""The row ledger: whatever arrives in whatever order, a unit is right or reports what is missing.

Rows go through the real staging, the real writers (threads and processes) and a local store.
"""

from __future__ import annotations

import queue
from pathlib import Path

import numpy as np
import pytest
import torch

from capture.assembly import Assembly, RankReport, first_failed
from capture.errors import CaptureStalled
from capture.lanes import Broken, process_lanes, serve, thread_lanes
from capture.rows import Run, Span, UnitLayout, plan_step
from capture.settings import StoreLocation
from capture.shard_loop import OpenUnit, SealUnit, Tap
from capture.slabs import Entry, Slab, TapShape
from capture.staging import Staging
from store.codec import Codec
from store.geometry import ArrayGeometry
from store.objects.open import open_store
from store.shard import decode_chunk

HEADS, SIZE = 2, 4
SITES = ("rot_q", "z")
SHAPE = TapShape(HEADS, SIZE, item_bytes=4, group_heads=HEADS, chunk_tokens=256)


def geometry(num_tokens: int) -> ArrayGeometry:
    """Shards of 256 tokens, so that a unit of more has several."""
    return ArrayGeometry.plan(
        num_layers=1,
        num_tokens=num_tokens,
        num_heads=HEADS,
        shard_heads=HEADS,
        head_size=SIZE,
        item_bytes=4,
        max_shard_bytes=256 * HEADS * SIZE * 4,
    )


class Rank:
    """Staging and assembly of one rank with two taps, and units of known values."""

    def __init__(
        self, folder: Path, in_processes: bool, codec: Codec = Codec.RAW, writers: int = 2
    ) -> None:
        self.objects = open_store(str(folder))
        self.reports: queue.Queue[RankReport] = queue.Queue()
        taps = [Tap(site, 0, 0, HEADS * SIZE * 4) for site in SITES]
        self.staging = Staging(
            slot_bytes=32 << 10,
            num_slabs=6,
            num_device_slots=2,
            device=torch.device("cpu"),
            on_slab=self._submit,
        )
        memory = self.staging.pool.memory

        def start_lanes(shares, on_answer):
            if in_processes:
                location = StoreLocation(str(folder))
                return process_lanes(0, shares, codec, location, memory, on_answer)
            return thread_lanes(0, shares, codec, self.objects, memory, on_answer)

        self.assembly = Assembly(0, taps, writers, self.staging.pool, start_lanes, self.reports.put)
        self.codec = codec

    def _submit(self, slab: Slab) -> None:
        self.assembly.submit(slab)

    def open(self, key: int, lengths: list[int], *, held: bool = False) -> UnitLayout:
        layout = UnitLayout.plan(key, key, f"a{key}", lengths)
        cuts = {site: geometry(layout.total_rows) for site in SITES}
        self.assembly.open_unit(OpenUnit(layout, cuts, held))
        return layout

    def step(self, *spans: Span, shift: float = 0.0, taps: tuple[int, ...] = (0, 1)) -> None:
        """Compute rows: each holds 10^4 unit + 100 prompt + position, plus the site's number."""
        plan = plan_step(spans, self.assembly.layouts())
        rows = [(s.unit, s.prompt, s.position + i) for s in spans for i in range(s.num_rows)]
        base = torch.tensor([10_000.0 * u + 1000 * p + at for u, p, at in rows])
        index = None if plan.index is None else torch.from_numpy(plan.index)
        for tap in taps:
            self.staging.pool.wait_free(2, 5.0)
            x_TF = base[:, None] + torch.arange(HEADS * SIZE) / 100 + tap / 4 + shift
            self.staging.put(tap, x_TF, SHAPE, index, plan.num_rows, plan.runs)

    def seal(self, key: int, final: UnitLayout | None = None) -> RankReport:
        self.staging.flush()
        if final is None:
            self.assembly.seal_unit(key)
        else:
            cuts = {site: geometry(final.total_rows) for site in SITES}
            self.assembly.seal_unit(key, OpenUnit(final, cuts))
        return self.reports.get(timeout=60)

    def rows(self, report: RankReport, site: str, num_tokens: int) -> np.ndarray:
        """Return what was stored of a site, [H, T, D]."""
        cut, pieces = geometry(num_tokens), []
        for shard in range(cut.num_token_shards):
            name = f"{site}/c/0/{shard}/0/0"
            record = next(record for record in report.objects if record.name == name)
            key = f"data/{report.key:08d}/a{report.key}/{name}"
            data = self.objects.get(key, max_bytes=1 << 20)
            assert len(data) == record.bytes
            stored = cut.raw_chunk_stride
            for chunk in range(-(-cut.tokens_in_shard(shard) // cut.chunk_tokens)):
                part = memoryview(data)[chunk * stored : (chunk + 1) * stored]
                dtype = np.dtype("float32")
                pieces.append(decode_chunk(cut, part, self.codec, dtype, key, chunk))
        return np.concatenate(pieces, axis=1)[:, :num_tokens]


@pytest.fixture(params=[False, True], ids=["threads", "processes"])
def rank(tmp_path: Path, request: pytest.FixtureRequest):
    rank = Rank(tmp_path, request.param)
    yield rank
    rank.assembly.close()


def expected(layout: UnitLayout, tap: int, shift: float = 0.0) -> np.ndarray:
    rows = [
        10_000.0 * layout.key + 1000 * prompt + position
        for prompt, length in enumerate(layout.num_rows)
        for position in range(length)
    ]
    values_TF = np.asarray(rows, np.float32)[:, None] + np.arange(HEADS * SIZE) / 100 + tap / 4
    shape = (len(rows), HEADS, SIZE)
    return (values_TF + shift).astype(np.float32).reshape(shape).transpose(1, 0, 2)


def assert_whole(rank: Rank, layout: UnitLayout, report: RankReport) -> None:
    assert report.error is None, report.error
    assert report.rows == dict.fromkeys(SITES, layout.total_rows)
    for tap, site in enumerate(SITES):
        got = rank.rows(report, site, layout.total_rows)
        np.testing.assert_allclose(got, expected(layout, tap), rtol=1e-6)


def test_rows_in_any_order_make_up_the_unit(rank: Rank) -> None:
    one, two = rank.open(1, [5, 300, 0, 7]), rank.open(2, [40])
    rank.step(Span(1, 3, 0, 7), Span(2, 0, 0, 20), Span(1, 1, 0, 100))
    rank.step(Span(1, 1, 100, 200), Span(2, 0, 20, 20))
    rank.step(Span(1, 0, 0, 5))
    assert_whole(rank, one, rank.seal(1))
    assert_whole(rank, two, rank.seal(2))


def test_a_shard_that_fills_in_one_step_goes_straight_out(rank: Rank) -> None:
    layout = rank.open(1, [256, 256, 3])
    rank.step(Span(1, 1, 0, 256))
    rank.step(Span(1, 0, 0, 256), Span(1, 2, 0, 3))
    assert_whole(rank, layout, rank.seal(1))


def test_a_missing_row_is_named(rank: Rank) -> None:
    rank.open(1, [5, 300])
    rank.step(Span(1, 0, 0, 5), Span(1, 1, 0, 120))
    rank.step(Span(1, 1, 121, 179))
    error = rank.seal(1).error
    assert "no row for position 120 of prompt 1" in error
    assert "site rot_q" in error or "site z" in error


def test_a_tensor_that_never_came_is_named(rank: Rank) -> None:
    rank.open(1, [5])
    rank.step(Span(1, 0, 0, 5), taps=(0,))
    assert "site z, layer index 0, rank 0: no row for position 0" in rank.seal(1).error


def test_a_row_computed_again_replaces_the_earlier_one(rank: Rank) -> None:
    layout = rank.open(1, [20, 4])
    rank.step(Span(1, 0, 0, 12), shift=500.0)
    rank.step(Span(1, 0, 0, 20))
    rank.step(Span(1, 1, 0, 4))
    assert_whole(rank, layout, rank.seal(1))


def test_rows_computed_again_never_count_twice(rank: Rank) -> None:
    rank.open(1, [20])
    rank.step(Span(1, 0, 0, 10))
    rank.step(Span(1, 0, 0, 10))
    assert "no row for position 10 of prompt 0" in rank.seal(1).error


def test_a_failing_put_fails_its_unit_alone(rank: Rank, tmp_path: Path) -> None:
    whole, broken = rank.open(1, [6]), rank.open(2, [6])
    # A file where the unit's folder should be: no put below it can succeed.
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "00000002").write_text("in the way")
    rank.step(Span(2, 0, 0, 6), Span(1, 0, 0, 6))
    assert_whole(rank, whole, rank.seal(1))
    report = rank.seal(2)
    assert "NotAFile" in report.error
    # Another unit was stored meanwhile: what stands in one's way is no trouble of the store.
    assert not report.store_failed
    assert broken.total_rows == 6
    assert report.objects == ()


def test_a_unit_tells_before_its_end_that_it_has_failed(rank: Rank, tmp_path: Path) -> None:
    rank.open(1, [6, 4])
    rank.open(2, [6])
    rank.open(3, [6])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "00000002").write_text("in the way")
    rank.assembly.fail_unit(3, "the probe failed")
    assert rank.assembly.unit_error(2) is None
    rank.step(Span(2, 0, 0, 6), Span(1, 0, 0, 6), Span(3, 0, 0, 6))
    rank.staging.flush()
    assert rank.assembly.unit_error(1) is None
    assert "NotAFile" in (rank.assembly.unit_error(2) or "")
    assert rank.assembly.unit_error(3) == "the probe failed"
    rank.step(Span(1, 1, 0, 4))
    assert rank.seal(1).error is None


def test_rows_of_a_failed_unit_go_nowhere(rank: Rank) -> None:
    rank.open(1, [6])
    kept = rank.open(2, [6])
    rank.step(Span(1, 0, 0, 3), Span(2, 0, 0, 3))
    rank.assembly.fail_unit(1, "as vLLM said")
    rank.step(Span(1, 0, 3, 3), Span(2, 0, 3, 3))
    assert_whole(rank, kept, rank.seal(2))
    report = rank.seal(1)
    assert (report.error, report.objects) == ("as vLLM said", ())
    assert not report.store_failed


def test_an_error_that_only_quotes_a_failing_store_is_the_units_own(rank: Rank) -> None:
    rank.open(1, [6])
    rank.assembly.fail_unit(1, "store.errors.StoreError: Connection refused")
    assert not rank.seal(1).store_failed


def test_a_units_own_error_is_told_before_the_stores() -> None:
    whole = RankReport(1, 0)
    full = RankReport(1, 1, error="the disk is full", store_failed=True)
    own = RankReport(1, 2, error="a probe raised")
    assert first_failed([whole, full, own]) is own
    assert first_failed([whole, full]) is full
    assert first_failed([whole]) is None


def test_a_message_that_a_writer_cannot_obey_is_an_error_not_a_silence() -> None:
    class Failing:
        def handle(self, message: object) -> None:
            raise IndexError("as a fault of ours would")

    answers: list[object] = []
    serve(Failing(), None, SealUnit(1), answers.append)  # type: ignore[arg-type]
    (answer,) = answers
    assert isinstance(answer, Broken)
    assert "as a fault of ours would" in answer.error


def test_an_error_of_no_unit_is_raised_at_the_next_check(rank: Rank) -> None:
    rank.open(1, [6])
    slab = rank.staging.pool.take()
    slab.entries = [Entry(0, (32 << 10) - 8, SHAPE, 6, (Run(1, 0, 6, 0),))]
    rank.assembly.submit(slab)
    assert "no row for position 0" in rank.seal(1).error
    with pytest.raises(RuntimeError, match="cannot reshape"):
        rank.assembly.check()
    with pytest.raises(CaptureStalled, match="will not become free"):
        rank.staging.pool.wait_free(6, 60.0)


def test_a_writer_process_that_dies_is_noticed(tmp_path: Path) -> None:
    rank = Rank(tmp_path, in_processes=True)
    layout = rank.open(1, [6])
    rank.step(Span(1, 0, 0, 6))
    assert_whole(rank, layout, rank.seal(1))
    rank.assembly._lanes[0].process.kill()
    with pytest.raises(CaptureStalled, match="shard writer process 0 ended"):
        rank.staging.pool.wait_free(99, 30.0)
    with pytest.raises(RuntimeError, match="shard writer process 0 ended"):
        rank.assembly.check()
    rank.assembly.close()


def test_units_take_turns_where_writers_outnumber_taps(tmp_path: Path) -> None:
    rank = Rank(tmp_path, in_processes=False, writers=7)
    assert len(rank.assembly._lanes) == 6
    layouts = [rank.open(key, [40, 300]) for key in range(5)]
    for start in range(0, 300, 100):
        rank.step(*(Span(key, 1, start, 100) for key in range(5)))
    rank.step(*(Span(key, 0, 0, 40) for key in range(4)))
    for layout in layouts[:4]:
        assert_whole(rank, layout, rank.seal(layout.key))
    assert "no row for position 0 of prompt 0" in rank.seal(4).error
    rank.staging.pool.wait_free(rank.staging.pool.num_slabs, 10.0)
    rank.assembly.close()


def test_slabs_all_come_back(rank: Rank) -> None:
    rank.open(1, [2000])
    for start in range(0, 2000, 100):
        rank.step(Span(1, 0, start, 100))
    assert rank.seal(1).error is None
    rank.staging.pool.wait_free(rank.staging.pool.num_slabs, 10.0)


def test_a_held_unit_is_cut_to_what_its_prompts_got(rank: Rank) -> None:
    rank.open(1, [270, 40, 0, 300, 8], held=True)
    final = UnitLayout.plan(1, 1, "a1", [256, 40, 0, 130, 3])
    rank.step(Span(1, 0, 0, 256), Span(1, 1, 0, 30), Span(1, 3, 0, 130))
    rank.step(Span(1, 4, 0, 3), Span(1, 1, 30, 10), Span(1, 0, 256, 5))
    report = rank.seal(1, final)
    assert_whole(rank, final, report)


def test_a_row_that_a_held_unit_lacks_is_named(rank: Rank) -> None:
    rank.open(1, [20, 20], held=True)
    final = UnitLayout.plan(1, 1, "a1", [20, 10])
    rank.step(Span(1, 0, 0, 20), Span(1, 1, 0, 7), Span(1, 1, 8, 2))
    assert "no row for position 7 of prompt 1" in rank.seal(1, final).error
