"""Patterns made by the shard writers are those that a reader rebuilds, however their rows come.

Rows go through the real staging, the real writers (threads and processes) and a local store.
Legend: N heads, T rows, D head size, Q query rows, K keys.
"""

from __future__ import annotations

import queue
from pathlib import Path

import numpy as np
import pytest
import torch

from capture.assembly import Assembly, RankReport
from capture.errors import CaptureError
from capture.lanes import process_lanes, thread_lanes
from capture.pattern_making import make_pattern
from capture.pattern_rows import PatternRecipe, bundles, first_entries, require_rows
from capture.rows import ALL_POSITIONS, Positions, Span, UnitLayout, plan_step
from capture.settings import StoreLocation
from capture.shard_loop import OpenUnit, Tap
from capture.slabs import Slab, TapShape
from capture.staging import Staging
from store.attention import HeadRows, pattern
from store.codec import DTYPES, Codec
from store.geometry import ArrayGeometry
from store.objects.open import open_store
from store.packed_pattern import UINT8_WORST_ERROR, pack_pattern, plan_pattern, unpack_pattern
from store.run_format import LayerSemantics, Site
from store.shard import decode_chunk

HEADS, KV_HEADS, SIZE = 4, 2, 8
PLAIN = LayerSemantics(
    layer=0, module="m", num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, v_head_size=SIZE,
    scale=0.4,
)  # fmt: skip
LAYERS = {
    "plain": PLAIN,
    "window": PLAIN.model_copy(update={"sliding_window": 5}),
    "soft-cap": PLAIN.model_copy(update={"logit_softcap": 1.5}),
    "sinks": PLAIN.model_copy(update={"sinks": [0.5, -1.0, 2.0, 0.0]}),
    "ALiBi": PLAIN.model_copy(update={"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}),
    "window and sinks": PLAIN.model_copy(
        update={"sliding_window": 3, "sinks": [0.5, -1.0, 2.0, 0.0]}
    ),
}
WITHIN = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8, "uint8": UINT8_WORST_ERROR + 1e-6}


def rows_of(seed: int, heads: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng([seed, heads]).standard_normal((heads, num_rows, SIZE), np.float32)


def head_rows(values_NTD: np.ndarray) -> HeadRows:
    return HeadRows(values_NTD, range(len(values_NTD)), np.arange(values_NTD.shape[1]))


def expected(semantics: LayerSemantics, q_NTD: np.ndarray, k_GTD: np.ndarray) -> np.ndarray:
    return pattern(semantics, head_rows(q_NTD), head_rows(k_GTD))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("tile_bytes", [1, 900, 1 << 20])
def test_tiles_make_up_the_whole_pattern(name: str, dtype: str, tile_bytes: int) -> None:
    q_NTD, k_GTD = rows_of(1, HEADS, 37), rows_of(2, KV_HEADS, 37)
    want_NQK = expected(LAYERS[name], q_NTD, k_GTD)
    q, k = head_rows(q_NTD), head_rows(k_GTD)
    pieces = list(make_pattern(LAYERS[name], q, k, dtype, tile_bytes))
    sizes = [piece.shape[1] for _, piece in pieces]
    assert [first for first, _ in pieces] == np.cumsum([0, *sizes[:-1]]).tolist()
    packed_NE = np.concatenate([piece for _, piece in pieces], axis=1)
    assert packed_NE.dtype == pack_pattern(want_NQK, dtype).dtype == DTYPES[dtype]
    got_NQK = unpack_pattern(packed_NE, 37).astype(np.float32)
    assert np.abs(got_NQK - want_NQK).max() <= WITHIN[dtype]


def test_a_tile_stays_within_its_budget() -> None:
    q, k = head_rows(rows_of(1, HEADS, 600)), head_rows(rows_of(2, KV_HEADS, 600))
    budget, last = 4 * HEADS * 600 * 3, 0
    for first, packed_NE in make_pattern(PLAIN, q, k, "float32", budget):
        row = round((2 * first + 0.25) ** 0.5 - 0.5)
        end = round((2 * (first + packed_NE.shape[1]) + 0.25) ** 0.5 - 0.5)
        assert 4 * HEADS * (end - row) * end <= budget
        last = end
    assert last == 600


def test_what_a_pattern_needs_is_asked_for() -> None:
    require_rows(None, (Site.Z,), Positions(-1, None))
    require_rows("float16", (Site.ROT_Q, Site.ROT_K), ALL_POSITIONS)
    with pytest.raises(CaptureError, match="add rot_k to the sites"):
        require_rows("float16", (Site.ROT_Q, Site.Z), ALL_POSITIONS)
    with pytest.raises(CaptureError, match="keep all positions"):
        require_rows("float16", (Site.ROT_Q, Site.ROT_K), Positions(-1, None))


def test_taps_of_a_pattern_go_to_one_writer() -> None:
    recipe = PatternRecipe(0, 2, (0, 1), (0,), PLAIN, "float32", "float16")
    assert bundles({0: None, 1: None, 2: None, 3: recipe}) == [[0, 2, 3], [1]]


class Rank:
    """One rank with a layer's rot_q, rot_k and z, and its pattern; rows are known by position."""

    shapes = (
        TapShape(HEADS, SIZE, 4, HEADS, 256),
        TapShape(KV_HEADS, SIZE, 4, KV_HEADS, 256),
        TapShape(HEADS, SIZE, 4, HEADS, 256),
    )

    def __init__(
        self, folder: Path, in_processes: bool, semantics: LayerSemantics, writes_k: bool = True
    ) -> None:
        self.objects = open_store(str(folder))
        self.reports: queue.Queue[RankReport] = queue.Queue()
        recipe = PatternRecipe(0, 1, (0, 1, 2, 3), (0, 1), semantics, "float32", "float32")
        taps = [
            Tap("rot_q", 0, 0, 128),
            Tap("rot_k", 0, 0, 64, writes=writes_k),
            Tap("z", 0, 0, 128),
            Tap("pattern", 0, 0, 0, recipe=recipe),
        ]
        self.staging = Staging(
            slot_bytes=64 << 10, num_slabs=6, num_device_slots=2, device=torch.device("cpu"),
            on_slab=self._submit,
        )  # fmt: skip
        memory = self.staging.pool.memory

        def start_lanes(shares, on_answer):
            if in_processes:
                place = StoreLocation(str(folder))
                return process_lanes(0, shares, Codec.RAW, place, memory, on_answer)
            return thread_lanes(0, shares, Codec.RAW, self.objects, memory, on_answer)

        self.assembly = Assembly(0, taps, 2, self.staging.pool, start_lanes, self.reports.put)

    def _submit(self, slab: Slab) -> None:
        self.assembly.submit(slab)

    def cuts(self, layout: UnitLayout) -> dict[str, ArrayGeometry]:
        def rows(heads: int) -> ArrayGeometry:
            return ArrayGeometry.plan(
                num_layers=1, num_tokens=layout.total_rows, num_heads=heads, shard_heads=heads,
                head_size=SIZE, item_bytes=4,
            )  # fmt: skip

        entries = int(first_entries(layout)[-1])
        packed = plan_pattern(
            num_layers=1, entries=entries, num_heads=HEADS, shard_heads=HEADS, dtype="float32"
        )
        return {"rot_q": rows(HEADS), "rot_k": rows(KV_HEADS), "z": rows(HEADS), "pattern": packed}

    def open(self, lengths: list[int], *, held: bool = False) -> UnitLayout:
        layout = UnitLayout.plan(0, 0, "a0", lengths)
        self.assembly.open_unit(OpenUnit(layout, self.cuts(layout), held))
        return layout

    def step(self, *spans: Span, seed: int = 0) -> None:
        plan = plan_step(spans, self.assembly.layouts())
        index = None if plan.index is None else torch.from_numpy(plan.index)
        for tap, shape in enumerate(self.shapes):
            self.staging.pool.wait_free(2, 5.0)
            x_NTD = np.concatenate(
                [
                    prompt_rows(s.prompt, tap, shape.num_heads, seed)[
                        :, s.position : s.position + s.num_rows
                    ]
                    for s in spans
                ],
                axis=1,
            )
            x_TF = torch.from_numpy(x_NTD.swapaxes(0, 1).reshape(x_NTD.shape[1], -1).copy())
            self.staging.put(tap, x_TF, shape, index, plan.num_rows, plan.runs)

    def seal(self, final: UnitLayout | None = None) -> RankReport:
        self.staging.flush()
        self.assembly.seal_unit(
            0, None if final is None else OpenUnit(final, self.cuts(final), False)
        )
        return self.reports.get(timeout=60)

    def patterns(self, report: RankReport, layout: UnitLayout) -> list[np.ndarray]:
        """Return what was stored of each prompt, [N, Q, K]."""
        cut = self.cuts(layout)["pattern"]
        assert cut.num_token_shards == 1
        assert "pattern/c/0/0/0" in {record.name for record in report.objects}
        key = "data/00000000/a0/pattern/c/0/0/0"
        data = memoryview(self.objects.get(key, max_bytes=1 << 24))
        heads = []
        for head in range(HEADS):
            chunks = []
            for chunk in range(cut.token_chunks_in_shard(0)):
                start = cut.raw_chunk_offset(0, head, chunk)
                stored = data[start : start + cut.raw_chunk_stride]
                number = cut.chunk_number(0, head, chunk)
                dtype = np.dtype("float32")
                chunks.append(decode_chunk(cut, stored, Codec.RAW, dtype, key, number))
            heads.append(np.concatenate(chunks, axis=1)[0, :, 0])
        starts = first_entries(layout)
        return [
            unpack_pattern(np.stack(heads)[:, starts[p] : starts[p + 1]], int(rows))
            for p, rows in enumerate(layout.num_rows)
        ]


def prompt_rows(prompt: int, tap: int, heads: int, seed: int = 0) -> np.ndarray:
    return rows_of(1000 * seed + 10 * prompt + tap, heads, 400)


def assert_patterns(rank: Rank, report: RankReport, layout: UnitLayout, name: str) -> None:
    assert report.error is None, report.error
    assert report.rows["pattern"] == int(first_entries(layout)[-1])
    for prompt, got_NQK in enumerate(rank.patterns(report, layout)):
        rows = int(layout.num_rows[prompt])
        q, k = prompt_rows(prompt, 0, HEADS)[:, :rows], prompt_rows(prompt, 1, KV_HEADS)[:, :rows]
        np.testing.assert_allclose(got_NQK, expected(LAYERS[name], q, k), atol=1e-6)


@pytest.fixture(params=["threads", "processes"])
def make_rank(tmp_path: Path, request: pytest.FixtureRequest):
    made: list[Rank] = []

    def make(name: str, **options: bool) -> Rank:
        made.append(Rank(tmp_path, request.param == "processes", LAYERS[name], **options))
        return made[-1]

    yield make
    for rank in made:
        rank.assembly.close()


@pytest.mark.parametrize("name", LAYERS)
def test_patterns_of_prompts_in_pieces_and_beside_each_other(make_rank, name: str) -> None:
    rank = make_rank(name)
    layout = rank.open([300, 0, 1, 40])
    rank.step(Span(0, 3, 0, 40), Span(0, 0, 0, 100))
    rank.step(Span(0, 0, 100, 30), seed=9)  # computed again below: the later rows count
    rank.step(Span(0, 0, 100, 150), Span(0, 2, 0, 1))
    rank.step(Span(0, 0, 250, 50))
    assert_patterns(rank, rank.seal(), layout, name)


def test_a_continued_prompt_has_the_rows_it_got_in_the_end(make_rank) -> None:
    rank = make_rank("window")
    rank.open([60, 50], held=True)
    rank.step(Span(0, 0, 0, 45), Span(0, 1, 0, 30))
    final = UnitLayout.plan(0, 0, "a0", [40, 30])
    assert_patterns(rank, rank.seal(final), final, "window")


def test_keys_that_another_rank_stores_serve_here_too(make_rank) -> None:
    rank = make_rank("plain", writes_k=False)
    layout = rank.open([20])
    rank.step(Span(0, 0, 0, 20))
    report = rank.seal()
    assert_patterns(rank, report, layout, "plain")
    assert not [record.name for record in report.objects if record.name.startswith("rot_k")]
    assert "rot_k" not in report.rows


def test_a_row_that_never_comes_leaves_the_pattern_unmade(make_rank) -> None:
    rank = make_rank("plain", writes_k=False)
    rank.open([20, 9])
    rank.step(Span(0, 1, 0, 9), Span(0, 0, 0, 19))
    error = rank.seal().error
    assert error is not None
    assert "RowsMissing" in error
    assert "of prompt 0 of the unit" in error


def test_rows_computed_again_after_the_pattern_fail_the_unit(make_rank) -> None:
    rank = make_rank("plain")
    rank.open([20, 9])
    rank.step(Span(0, 1, 0, 9))
    rank.step(Span(0, 1, 0, 9), Span(0, 0, 0, 20))
    assert "computed again after its pattern was made" in (rank.seal().error or "")


def test_a_writer_process_has_one_thread_in_blas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers would wait for each other: 14 of them beside a GPU, with a thread a core each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    rank = Rank(tmp_path, True, PLAIN)
    for lane in rank.assembly._lanes:
        told = Path(f"/proc/{lane.process.pid}/environ").read_bytes().split(b"\0")
        assert {b"OMP_NUM_THREADS=1", b"OPENBLAS_NUM_THREADS=1"} <= set(told)
        assert b"OMP_NUM_THREADS=16" not in told
    rank.assembly.close()


def test_short_prompts_of_a_step_have_the_bits_of_each_alone(make_rank) -> None:
    rank = make_rank("window and sinks")
    layout = rank.open([9] * 30 + [4] * 10)
    rank.step(*(Span(0, p, 0, 9) for p in range(0, 30, 2)))
    rank.step(
        *(Span(0, p, 0, 9) for p in range(1, 30, 2)), *(Span(0, p, 0, 4) for p in range(30, 40))
    )
    report = rank.seal()
    assert_patterns(rank, report, layout, "window and sinks")
    for prompt, got_NQK in enumerate(rank.patterns(report, layout)):
        rows = int(layout.num_rows[prompt])
        q, k = prompt_rows(prompt, 0, HEADS)[:, :rows], prompt_rows(prompt, 1, KV_HEADS)[:, :rows]
        want_NQK = expected(LAYERS["window and sinks"], q.copy(), k.copy())
        assert got_NQK.tobytes() == want_NQK.tobytes()
