"""What the self-check takes for noise, and what it does not."""

from __future__ import annotations

import numpy as np
import pytest

from capture.same_rows import GROSS, TOLERANCE, Verdict, same_rows

LAYERS, HEADS = [0, 3], [0, 1, 2, 5]


def values() -> np.ndarray:
    rng = np.random.default_rng(0)
    # Rows of a real head have much in common; so have these.
    common = rng.standard_normal((2, 4, 1, 16))
    return (common + rng.standard_normal((2, 4, 48, 16))).astype(np.float32)


def judge(
    got: np.ndarray, want: np.ndarray, dtype: str = "bfloat16", noise: float = 0.0
) -> Verdict:
    return same_rows("z", LAYERS, HEADS, got, want, dtype=dtype, noise=noise)


def noisy(want: np.ndarray, by: float) -> np.ndarray:
    return want + by * np.random.default_rng(1).standard_normal(want.shape).astype(np.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_noise_below_the_bar_of_the_dtype_passes(dtype: str) -> None:
    want = values()
    found = judge(noisy(want, TOLERANCE[dtype]), want, dtype)
    assert found.fault == ""
    assert 0.3 * TOLERANCE[dtype] < found.error < TOLERANCE[dtype]
    assert "layer" in found.where


def test_float32_beyond_its_bar_is_a_fault_and_a_noisy_model_raises_the_bar() -> None:
    want = values()
    got = noisy(want, 5e-3)
    assert judge(got, want, "float32").fault
    assert judge(got, want, "float32", noise=4e-3).fault == ""
    assert judge(noisy(want, 5e-2), want, "float32", noise=1.0).fault, "noise hides everything"


def test_rows_sent_to_another_expert_are_not_a_fault() -> None:
    want = values()
    got = noisy(want, 0.02)
    rng = np.random.default_rng(2)
    for row in (7, 20, 21, 40):
        got[1, :, row] += 1.2 * rng.standard_normal((4, 16))
    found = judge(got, want)
    assert TOLERANCE["bfloat16"] < found.error < GROSS
    assert found.fault == ""


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_exchanged_heads_are_found(dtype: str) -> None:
    want = values()
    got = noisy(want, TOLERANCE[dtype] / 4)
    got[1, [0, 3]] = got[1, [3, 0]]
    found = judge(got, want, dtype)
    assert found.fault
    assert "layer 3, head" in found.where
    if dtype != "float32":
        assert "rather those of head" in found.fault


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_two_exchanged_rows_are_found(dtype: str) -> None:
    want = values()
    got = noisy(want, TOLERANCE[dtype] / 4)
    got[0, :, [4, 30]] = got[0, :, [30, 4]]
    found = judge(got, want, dtype)
    assert found.fault
    if dtype != "float32":
        assert found.fault in ("row 4 is rather row 30", "row 30 is rather row 4")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_one_place_late_are_found(dtype: str) -> None:
    want = values()
    got = noisy(np.roll(want, 1, axis=2), TOLERANCE[dtype] / 4)
    assert judge(got, want, dtype).fault


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_of_nobody_are_found(dtype: str) -> None:
    want = values()
    got = noisy(want, 0.0)
    got[1, 2] = np.random.default_rng(3).standard_normal((48, 16)) * 1.4
    assert judge(got, want, dtype).fault
    assert judge(got, want, dtype, noise=2.0).fault
    got[1, 2] = np.nan
    assert judge(got, want, dtype).fault


def test_equal_rows_of_equal_tokens_are_no_exchange() -> None:
    want = values()
    want[:, :, 10] = want[:, :, 33]
    assert judge(noisy(want, 0.05), want).fault == ""


def test_a_fault_outweighs_a_larger_difference() -> None:
    small, large = Verdict(0.1, "here", "wrong"), Verdict(0.5, "there")
    assert small.worse(large) == large.worse(small) == small
    assert Verdict(0.2).worse(large) == large


def test_rows_that_do_not_differ_are_said_to_be_somewhere_too() -> None:
    same = Verdict(0.0, "z of prompt 0, layer 0, head 0")
    assert Verdict().worse(same) == same
    assert same.worse(Verdict(0.0, "z of prompt 1, layer 0, head 0")) == same


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mark", [np.nan, np.inf, -np.inf])
def test_rows_that_are_marked_as_unknown_in_both_are_the_same(dtype: str, mark: float) -> None:
    want = values()
    got = noisy(want, TOLERANCE[dtype] / 4)
    for one in (got, want):
        one[:, :, :40] = mark
        one[1, 2] = mark
    found = judge(got, want, dtype)
    assert found.fault == ""
    assert 0 < found.error < TOLERANCE[dtype]
    assert judge(np.full_like(want, mark), np.full_like(want, mark), dtype) == judge(
        np.zeros_like(want), np.zeros_like(want), dtype
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("ours", "theirs"), [(np.nan, 0.0), (0.0, np.nan), (np.inf, -np.inf)])
def test_rows_that_are_unknown_in_one_of_them_only_are_said_to_be(
    dtype: str, ours: float, theirs: float
) -> None:
    want = values()
    got = want.copy()
    got[1, 2, 5, 0], want[1, 2, 5, 0] = ours, theirs
    found = judge(got, want, dtype)
    assert np.isinf(found.error)
    assert "NaN or infinite" in found.fault
    assert "layer 3, head 2" in found.where


def test_exchanged_rows_are_found_beside_unknown_ones() -> None:
    want = values()
    want[:, :, :20] = np.nan
    got = want.copy()
    got[0, :, [24, 40]] = got[0, :, [40, 24]]
    assert judge(got, want).fault in ("row 24 is rather row 40", "row 40 is rather row 24")
