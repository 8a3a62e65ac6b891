"""Scores and patterns against a naive float64 implementation, one entry at a time."""

from __future__ import annotations

import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from store import attention
from store.attention import HeadRows, pattern, scores
from store.run_format import LayerSemantics

TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 37, 6, 2, 8

VARIANTS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window_of_one": {"sliding_window": 1},
    "softcap": {"logit_softcap": 2.0},
    "sinks": {"sinks": [0.5, -1.0, 3.0, 0.0, 9.0, -9.0]},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 1.0, 2.0, 0.0]},
    "everything": {
        "sliding_window": 11,
        "logit_softcap": 1.5,
        "sinks": [1.0] * 6,
        "alibi_slopes": [0.3] * 6,
    },
}


def layer(num_heads: int = HEADS, num_kv_heads: int = KV_HEADS, **more: object) -> LayerSemantics:
    return LayerSemantics(
        layer=0,
        module="m",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=HEAD_SIZE,
        v_head_size=HEAD_SIZE,
        scale=0.7,
        **more,  # type: ignore[arg-type]
    )


def naive(
    semantics: LayerSemantics, q_NTD: np.ndarray, k_GTD: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Every entry by the formula, in float64 and plain loops: (scores, pattern), both [N, T, T]."""
    heads, tokens, _ = q_NTD.shape
    share = heads // k_GTD.shape[0]
    out_s = np.full((heads, tokens, tokens), -np.inf)
    out_p = np.zeros((heads, tokens, tokens))
    for h in range(heads):
        for q in range(tokens):
            for k in range(q + 1):
                if semantics.sliding_window is not None and q - k >= semantics.sliding_window:
                    continue
                q_D, k_D = q_NTD[h, q].astype(float), k_GTD[h // share, k].astype(float)
                s = semantics.scale * float(np.dot(q_D, k_D))
                if semantics.logit_softcap:
                    s = semantics.logit_softcap * math.tanh(s / semantics.logit_softcap)
                if semantics.alibi_slopes:
                    s += semantics.alibi_slopes[h] * (k - q)
                out_s[h, q, k] = s
            total = sum(math.exp(s) for s in out_s[h, q] if s > -math.inf)
            if semantics.sinks:
                total += math.exp(semantics.sinks[h])
            for k in range(q + 1):
                out_p[h, q, k] = math.exp(out_s[h, q, k]) / total
    return out_s, out_p


def rows(values: np.ndarray) -> HeadRows:
    return HeadRows(values, range(len(values)), np.arange(values.shape[1]))


def sample(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    q_NTD = rng.standard_normal((HEADS, TOKENS, HEAD_SIZE), np.float32)
    return q_NTD, rng.standard_normal((KV_HEADS, TOKENS, HEAD_SIZE), np.float32)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tile_bytes", [32 << 20, 5 * 4 * TOKENS])
def test_equals_the_formula(variant: str, tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE_BYTES", tile_bytes)
    semantics = layer(**VARIANTS[variant])
    q_NTD, k_GTD = sample()
    want_s, want_p = naive(semantics, q_NTD, k_GTD)
    got_s = scores(semantics, rows(q_NTD), rows(k_GTD))
    got_p = pattern(semantics, rows(q_NTD), rows(k_GTD))
    assert got_s.dtype == got_p.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(got_s), np.isneginf(want_s))
    np.testing.assert_allclose(got_s[np.isfinite(want_s)], want_s[np.isfinite(want_s)], atol=2e-5)
    np.testing.assert_allclose(got_p, want_p, atol=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_part_equals_the_same_part_of_the_whole(variant: str) -> None:
    semantics = layer(**VARIANTS[variant])
    q_NTD, k_GTD = sample(1)
    heads, queries, keys = [4, 1], np.array([30, 2, 17]), np.array([17, 0, 3])
    part = HeadRows(q_NTD[np.ix_(heads, queries)], heads, queries)
    whole_s, whole_p = naive(semantics, q_NTD, k_GTD)
    pick = np.ix_(heads, queries, keys)
    got_p, got_s = (f(semantics, part, rows(k_GTD), keys) for f in (pattern, scores))
    np.testing.assert_allclose(got_p, whole_p[pick], atol=2e-6)
    np.testing.assert_allclose(got_s, whole_s[pick], atol=2e-5)


def test_only_the_needed_kv_head_has_to_be_there() -> None:
    semantics = layer()
    q_NTD, k_GTD = sample(2)
    q = HeadRows(q_NTD[4:5], [4], np.arange(TOKENS))
    second = HeadRows(k_GTD[1:], [1], np.arange(TOKENS))
    np.testing.assert_array_equal(pattern(semantics, q, second), pattern(semantics, q, rows(k_GTD)))
    with pytest.raises(ValueError, match="head 4 reads kv head 1"):
        pattern(semantics, q, HeadRows(k_GTD[:1], [0], np.arange(TOKENS)))


def test_a_missing_key_is_refused_because_the_denominator_would_be_wrong() -> None:
    q_NTD, k_GTD = sample(3)
    holed = np.delete(np.arange(TOKENS), 5)
    with pytest.raises(ValueError, match="needs the keys of all positions"):
        pattern(layer(), rows(q_NTD), HeadRows(k_GTD[:, holed], [0, 1], holed))


def test_rows_sum_to_one_less_the_sink() -> None:
    q_NTD, k_GTD = sample(4)
    np.testing.assert_allclose(pattern(layer(), rows(q_NTD), rows(k_GTD)).sum(-1), 1, atol=1e-6)
    sums = pattern(layer(sinks=[9.0] * HEADS), rows(q_NTD), rows(k_GTD)).sum(-1)
    assert 0 < sums.min() < 0.5


def test_bfloat16_rows_and_huge_scores_stay_finite() -> None:
    q_NTD, k_GTD = sample(5)
    q, k = (q_NTD * 100).astype(ml_dtypes.bfloat16), (k_GTD * 100).astype(ml_dtypes.bfloat16)
    got = pattern(layer(), rows(q), rows(k))
    assert np.isfinite(got).all()
    exact = pattern(layer(), rows(q.astype(np.float32)), rows(k.astype(np.float32)))
    np.testing.assert_array_equal(got, exact)


def test_no_queries_and_no_heads_give_empty_answers() -> None:
    q_NTD, k_GTD = sample(6)
    none = HeadRows(q_NTD[:, :0], range(HEADS), np.arange(0))
    assert pattern(layer(), none, rows(k_GTD)).shape == (HEADS, 0, TOKENS)
    no_head = HeadRows(q_NTD[:0], [], np.arange(TOKENS))
    assert scores(layer(), no_head, rows(k_GTD)).shape == (0, TOKENS, TOKENS)


def test_a_late_range_of_a_long_prompt_holds_tiles_and_no_square() -> None:
    long, rows = 32_768, 512
    semantics = layer(1, 1)
    rng = np.random.default_rng(0)
    k = HeadRows(rng.standard_normal((1, long, 8), np.float32), [0], np.arange(long))
    late = np.arange(long - rows, long)
    q = HeadRows(rng.standard_normal((1, rows, 8), np.float32), [0], late)
    tracemalloc.start()
    try:
        got = pattern(semantics, q, k, np.arange(16))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert got.shape == (1, rows, 16)
    assert peak < 5 * attention.TILE_BYTES < long * long * 4 / 16
