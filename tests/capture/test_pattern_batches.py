"""Patterns that are made together have the bits of each made alone, and stay within their bytes.

Legend: N heads, G key-value heads, T rows, D head size, E entries, Q query rows, K keys.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture import pattern_making
from capture.errors import RowsMissing
from capture.pattern_making import batches, fits_one_tile, make_pattern
from capture.pattern_rows import PatternRecipe, PatternRows, first_entries
from capture.rows import UnitLayout
from store.attention import HeadRows, pattern
from store.codec import DTYPES
from store.packed_pattern import num_entries, pack_pattern
from store.run_format import LayerSemantics

SEMANTICS: dict[str, dict] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "soft-cap": {"logit_softcap": 1.5},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0, 9.0, -9.0]},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.125, 1.0, 2.0, 0.0]},
    "all": {
        "sliding_window": 7, "logit_softcap": 2.0, "sinks": [1.0, 0.0, -1.0, 0.5, 0.2, 3.0],
        "alibi_slopes": [0.3, 0.2, 0.1, 0.4, 0.5, 0.6],
    },
}  # fmt: skip


def layer(
    num_heads: int = 6, num_kv_heads: int = 3, head_size: int = 8, **more: object
) -> LayerSemantics:
    return LayerSemantics(
        layer=0, module="m", num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
        v_head_size=head_size, scale=0.4, **more,  # type: ignore[arg-type]
    )  # fmt: skip


class Rows:
    """The rows of a unit's two taps, and what a reader would rebuild of them."""

    def __init__(self, recipe: PatternRecipe, lengths: Sequence[int], seed: int) -> None:
        self.recipe, self.layout = recipe, UnitLayout.plan(0, 0, "a0", lengths)
        size, rng = recipe.semantics.head_size, np.random.default_rng(seed)
        self.of_tap = {
            tap: rng.standard_normal((len(heads), self.layout.total_rows, size), np.float32).astype(
                DTYPES[recipe.row_dtype]
            )
            for tap, heads in ((recipe.q_tap, recipe.q_heads), (recipe.k_tap, recipe.k_heads))
        }

    def staged(self, tap: int) -> np.ndarray:
        """Return the rows of a tap as a step has them, [G, C, g, t, D] with one head a group."""
        values = self.of_tap[tap]
        return values.view(f"u{values.itemsize}")[:, None, None]

    def place(self, patterns: PatternRows, tap: int, row: int, count: int) -> list[int]:
        return patterns.place(tap, row, count, self.staged(tap), row)

    def alone(self, prompt: int, num_rows: int, tile_bytes: int) -> np.ndarray:
        """Return the packed [N, E] of one prompt: as rebuilt, or by tiles where it needs them."""
        recipe, first = self.recipe, int(self.layout.first_row[prompt])
        q, k = (
            HeadRows(
                np.ascontiguousarray(self.of_tap[tap][:, first : first + num_rows]),
                heads,
                np.arange(num_rows),
            )
            for tap, heads in ((recipe.q_tap, recipe.q_heads), (recipe.k_tap, recipe.k_heads))
        )
        if fits_one_tile(len(recipe.q_heads), num_rows, tile_bytes):
            return pack_pattern(pattern(recipe.semantics, q, k), recipe.dtype)
        tiles = make_pattern(recipe.semantics, q, k, recipe.dtype, tile_bytes)
        return np.concatenate([packed for _, packed in tiles], axis=1)


def recipe_of(
    semantics: LayerSemantics,
    dtype: str = "float16",
    row_dtype: str = "float32",
    q_heads: Sequence[int] | None = None,
    k_heads: Sequence[int] | None = None,
) -> PatternRecipe:
    return PatternRecipe(
        4, 7,
        tuple(range(semantics.num_heads) if q_heads is None else q_heads),
        tuple(range(semantics.num_kv_heads) if k_heads is None else k_heads),
        semantics, row_dtype, dtype,
    )  # fmt: skip


def taken(
    patterns: PatternRows, prompts: Sequence[int], layout: UnitLayout, into_NE: np.ndarray
) -> np.ndarray:
    """Put what is made of the prompts where it belongs; return which entries that was."""
    seen_E = np.zeros(into_NE.shape[1], np.int64)
    for entry, packed_NE in patterns.take(prompts, layout):
        assert packed_NE.dtype == into_NE.dtype
        into_NE[:, entry : entry + packed_NE.shape[1]] = packed_NE
        seen_E[entry : entry + packed_NE.shape[1]] += 1
    return seen_E


def assert_bits(rows: Rows, packed_NE: np.ndarray, layout: UnitLayout, tile_bytes: int) -> None:
    starts = first_entries(layout)
    for prompt, num_rows in enumerate(layout.num_rows.tolist()):
        got = np.ascontiguousarray(packed_NE[:, starts[prompt] : starts[prompt + 1]])
        want = rows.alone(prompt, num_rows, tile_bytes) if num_rows else got[:, :0]
        assert got.tobytes() == want.tobytes(), (prompt, num_rows)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """Draw lengths of prompts, and rows of the unit in the order in which they are computed."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 8, 8, 13, 30]), min_size=1))
    total = sum(lengths)
    cuts = draw(st.lists(st.integers(0, total), max_size=5))
    edges = sorted({0, total, *cuts})
    runs = [(a, b - a) for a, b in pairwise(edges)]
    return lengths, draw(st.permutations(runs))


@settings(max_examples=60, deadline=None)
@given(
    steps(), st.sampled_from(list(SEMANTICS)), st.sampled_from(["float16", "float32", "uint8"]),
    st.sampled_from([1, 2_000, 20_000, 8 << 20]), st.sampled_from([1, 1_000, 8 << 20]),
    st.integers(0, 9),
)  # fmt: skip
def test_every_prompt_has_the_bits_of_it_alone(
    drawn: tuple[list[int], list[tuple[int, int]]],
    name: str,
    dtype: str,
    tile_bytes: int,
    batch_bytes: int,
    seed: int,
) -> None:
    lengths, runs = drawn
    rows = Rows(recipe_of(layer(**SEMANTICS[name]), dtype), lengths, seed)
    layout = rows.layout
    patterns = PatternRows(rows.recipe, layout, tile_bytes, batch_bytes)
    packed_NE = np.zeros((6, int(first_entries(layout)[-1])), DTYPES[dtype])
    made_E = np.zeros(packed_NE.shape[1], np.int64)
    for row, count in runs:
        assert rows.place(patterns, 4, row, count) == []
        whole = rows.place(patterns, 7, row, count)
        made_E += taken(patterns, whole, layout, packed_NE)
    assert made_E.tolist() == [1] * len(made_E)
    assert_bits(rows, packed_NE, layout, tile_bytes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "row_dtype"),
    [(9, 3, 64, "float32"), (32, 8, 128, "bfloat16"), (8, 8, 80, "float16"), (7, 1, 96, "float32")],
)
def test_models_shapes_have_the_same_bits_together(
    heads: int, kv_heads: int, size: int, row_dtype: str
) -> None:
    lengths = [8] * 40 + [32] * 20 + [17, 64, 64, 17, 64, 100, 128, 100, 1, 1]
    semantics = layer(heads, kv_heads, size, sinks=np.linspace(-2, 2, heads).tolist())
    rows = Rows(recipe_of(semantics, "float32", row_dtype), lengths, 0)
    patterns = PatternRows(rows.recipe, rows.layout)
    rows.place(patterns, 4, 0, sum(lengths))
    whole = rows.place(patterns, 7, 0, sum(lengths))
    assert whole == list(range(len(lengths)))
    packed_NE = np.empty((heads, int(first_entries(rows.layout)[-1])), np.float32)
    assert taken(patterns, whole, rows.layout, packed_NE).tolist() == [1] * packed_NE.shape[1]
    assert_bits(rows, packed_NE, rows.layout, pattern_making.TILE_BYTES)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", SEMANTICS)
def test_the_shortest_prompts_have_the_same_bits_together(name: str, length: int) -> None:
    rows = Rows(recipe_of(layer(**SEMANTICS[name]), "float32"), [length] * 50, 1)
    patterns = PatternRows(rows.recipe, rows.layout)
    rows.place(patterns, 4, 0, 50 * length)
    packed_NE = np.empty((6, 50 * num_entries(length)), np.float32)
    taken(patterns, rows.place(patterns, 7, 0, 50 * length), rows.layout, packed_NE)
    assert_bits(rows, packed_NE, rows.layout, pattern_making.TILE_BYTES)


def test_some_of_the_heads_have_the_same_bits_together() -> None:
    recipe = recipe_of(layer(**SEMANTICS["all"]), "float32", q_heads=(2, 3, 5), k_heads=(1, 2))
    rows = Rows(recipe, [9] * 30, 3)
    patterns = PatternRows(recipe, rows.layout)
    rows.place(patterns, 7, 0, 270)
    packed_NE = np.empty((3, 30 * 45), np.float32)
    taken(patterns, rows.place(patterns, 4, 0, 270), rows.layout, packed_NE)
    assert_bits(rows, packed_NE, rows.layout, 8 << 20)


def test_prompts_of_one_length_go_together_within_the_bytes() -> None:
    lengths = [8, 8, 3, 8, 8, 3, 8]
    of_8 = 4 * 6 * 64
    assert list(batches(lengths, 6, 2, 3 * of_8)) == [[0, 1, 3], [4, 6], [2, 5]]
    assert list(batches(lengths, 6, 2, 1)) == [[0], [1], [3], [4], [6], [2], [5]]
    assert list(batches(lengths, 6, 16, 3 * of_8)) == [[0], [1], [3], [4], [6], [2, 5]]


def test_short_prompts_of_a_step_are_made_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def counted(semantics: LayerSemantics, q: HeadRows, k: HeadRows) -> np.ndarray:
        calls.append(q.values.shape)
        return pattern(semantics, q, k)

    monkeypatch.setattr(pattern_making, "pattern", counted)
    rows = Rows(recipe_of(layer()), [8] * 100 + [5] * 20, 0)
    patterns = PatternRows(rows.recipe, rows.layout)
    rows.place(patterns, 4, 0, 900)
    pieces = list(patterns.take(rows.place(patterns, 7, 0, 900), rows.layout))
    assert [entry for entry, _ in pieces] == [0]
    assert sorted(calls) == [(20, 6, 5, 8), (100, 6, 8, 8)]


def test_rows_computed_again_before_the_others_come_count() -> None:
    old, rows = (Rows(recipe_of(layer(), "float32"), [8] * 12, seed) for seed in (0, 1))
    patterns = PatternRows(rows.recipe, rows.layout)
    old.place(patterns, 4, 0, 96)
    rows.place(patterns, 4, 0, 20)
    rows.place(patterns, 4, 20, 76)
    packed_NE = np.empty((6, 12 * 36), np.float32)
    taken(patterns, rows.place(patterns, 7, 0, 96), rows.layout, packed_NE)
    assert_bits(rows, packed_NE, rows.layout, 8 << 20)


def test_rows_of_one_that_was_made_together_with_others_are_refused() -> None:
    rows = Rows(recipe_of(layer()), [8] * 12, 0)
    patterns = PatternRows(rows.recipe, rows.layout)
    rows.place(patterns, 4, 0, 96)
    assert len(list(patterns.take(rows.place(patterns, 7, 0, 44), rows.layout))) == 1
    with pytest.raises(RowsMissing, match="rows of prompt 3 were computed again after"):
        rows.place(patterns, 4, 31, 10)
    assert rows.place(patterns, 7, 44, 52) == [5, 6, 7, 8, 9, 10, 11]


def test_one_that_lacks_a_row_is_left_out_of_those_made_together() -> None:
    rows = Rows(recipe_of(layer(), "float32"), [8] * 4, 0)
    patterns = PatternRows(rows.recipe, rows.layout)
    rows.place(patterns, 4, 0, 32)
    rows.place(patterns, 7, 0, 11)
    rows.place(patterns, 7, 12, 20)
    packed_NE = np.zeros((6, 4 * 36), np.float32)
    made_E = taken(patterns, [0, 1, 2, 3], rows.layout, packed_NE)
    assert made_E.reshape(4, 36).tolist() == [[1] * 36, [0] * 36, [1] * 36, [1] * 36]


def test_prompts_that_ended_early_are_made_together_of_the_rows_they_got() -> None:
    rows = Rows(recipe_of(layer(), "float32"), [20, 20, 0, 20], 0)
    patterns = PatternRows(rows.recipe, rows.layout)
    for tap in (4, 7):
        for first, count in ((0, 12), (20, 7), (40, 12)):
            rows.place(patterns, tap, first, count)
    final = UnitLayout.plan(0, 0, "a0", [12, 7, 0, 12])
    packed_NE = np.empty((6, 2 * num_entries(12) + num_entries(7)), np.float32)
    assert taken(patterns, [3, 1, 0], final, packed_NE).tolist() == [1] * packed_NE.shape[1]
    assert_bits(rows, packed_NE, final, 8 << 20)


@pytest.mark.parametrize("lengths", [[8] * 1500, [32] * 300, [300] * 3, [2, 300, 8, 8, 90] * 8])
def test_making_stays_within_its_bytes_and_keeps_no_rows(lengths: list[int]) -> None:
    tile_bytes = 256 << 10
    rows = Rows(recipe_of(layer(), "float32"), lengths, 0)
    staged = {tap: rows.staged(tap) for tap in (4, 7)}
    list(PatternRows(rows.recipe, rows.layout).take([], rows.layout))
    gc.collect()
    tracemalloc.start()
    patterns = PatternRows(rows.recipe, rows.layout, tile_bytes)
    before = tracemalloc.get_traced_memory()[0]
    whole = [patterns.place(tap, 0, sum(lengths), staged[tap], 0) for tap in (4, 7)][1]
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.reset_peak()
    made = 0
    for _, packed_NE in patterns.take(whole, rows.layout):
        assert packed_NE.nbytes <= max(tile_bytes, 4 * 6 * max(lengths))
        made += packed_NE.shape[1]
        del packed_NE
    after, peak = (size - before for size in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    assert made == int(first_entries(rows.layout)[-1])
    assert peak - kept <= 6 * tile_bytes
    assert after <= kept // 4


def test_a_layer_in_bfloat16_is_made_in_float32() -> None:
    rows = Rows(recipe_of(layer(), "float32", "bfloat16"), [8] * 3, 0)
    assert rows.of_tap[4].dtype == ml_dtypes.bfloat16
    patterns = PatternRows(rows.recipe, rows.layout)
    rows.place(patterns, 4, 0, 24)
    ((_, packed_NE),) = patterns.take(rows.place(patterns, 7, 0, 24), rows.layout)
    last_NK = packed_NE[:, 28:36]
    np.testing.assert_allclose(last_NK.sum(axis=1), np.ones(6), atol=1e-6)
