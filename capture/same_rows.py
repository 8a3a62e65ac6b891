"""Whether rows that were captured twice are the same rows, as far as the arithmetic can tell.

A batch is computed in another order than a prompt alone, and 16 bits show it: a little everywhere,
and a lot in single rows of models that choose experts, where a rounding sends a token to another
one. So a difference above the bar is no fault by itself there. It is one where the rows are nearer
to other rows than to their own (exchanged heads, rows out of place), or near to none. Knows arrays
only.

Legend: L layers, H heads, T rows, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Root mean square of a head's differences over that of its values, as batching may change it."""

NOISE_FACTOR = 4.0
"""The bar is at least so many times what the model differs from itself, run twice alike."""

HIGHEST_BAR = {"float32": 1e-2, "float16": 1e-1, "bfloat16": 3e-1}
"""However much a model differs from itself: a fault may do that too."""

GROSS = 0.7
"""Rows that have nothing to do with each other differ by 1.4: no rounding comes near that."""

ROW_BAR = 0.5
"""A single row that differs so much, of its head's root mean square, is looked for elsewhere."""

NEARER = 0.5
"""Rows are another's if they differ from it by less than this part of how much from their own."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The largest difference of two captures of the same rows, where it is, and what is wrong."""

    error: float = 0.0
    where: str = ""
    fault: str = ""
    """Empty where noise explains the difference."""

    def worse(self, other: Verdict) -> Verdict:
        """Return the one that says more: a fault before none, then the larger difference."""
        return max(self, other, key=lambda one: (bool(one.fault), one.error, bool(one.where)))


def matched(got_LHTD: Array, want_LHTD: Array) -> tuple[Array, Array]:
    """Return both as float32, with 0 where both hold NaN or the same infinity.

    A probe may mark rows that it does not know by NaN; those are the same rows, and differences of
    the others are looked for as if there were none.
    """
    got, want = got_LHTD.astype(np.float32), want_LHTD.astype(np.float32)
    alike = np.isnan(got) & np.isnan(want) | np.isinf(want) & (got == want)
    return (np.where(alike, 0, got), np.where(alike, 0, want)) if alike.any() else (got, want)


def head_errors(got_LHTD: Array, want_LHTD: Array) -> Array:
    """Return each head's root mean square difference over that of what is wanted, [L, H].

    Infinite where a value is NaN or infinite in one of them only.
    """
    got, want = matched(got_LHTD, want_LHTD)
    size_LH = np.sqrt((want**2).mean(axis=(2, 3))) + 1e-12
    with np.errstate(invalid="ignore"):
        error_LH = np.sqrt(((got - want) ** 2).mean(axis=(2, 3))) / size_LH
    return np.where(np.isfinite(error_LH), error_LH, np.inf)


def largest(
    what: str, layers: Sequence[int], heads: Sequence[int], got_LHTD: Array, want_LHTD: Array
) -> Verdict:
    """Return the largest difference by head and where it is, without judging it."""
    error_LH = head_errors(got_LHTD, want_LHTD)
    layer, head = divmod(int(error_LH.argmax()), error_LH.shape[1])
    where = f"{what}, layer {layers[layer]}, head {heads[head]}"
    return Verdict(float(error_LH[layer, head]), where)


def same_rows(
    what: str,
    layers: Sequence[int],
    heads: Sequence[int],
    got_LHTD: Array,
    want_LHTD: Array,
    *,
    dtype: str,
    noise: float,
) -> Verdict:
    """Judge whether rows are those wanted; `noise` is what two like captures differed by."""
    found = largest(what, layers, heads, got_LHTD, want_LHTD)
    bar = min(max(TOLERANCE[dtype], NOISE_FACTOR * noise), HIGHEST_BAR[dtype])
    error_LH = head_errors(got_LHTD, want_LHTD)
    got, want = matched(got_LHTD, want_LHTD)
    torn = ~np.isfinite(got - want)
    if torn.any():
        count = int(torn.sum())
        fault = f"{count} values are NaN or infinite in one of them and not in the other"
        return Verdict(np.inf, found.where, fault)
    exact = dtype == "float32"
    if exact and found.error > bar:
        return Verdict(found.error, found.where, f"{bar:.2g} is allowed")
    for layer, head in np.argwhere(error_LH > bar):
        own = float(error_LH[layer, head])
        where = f"{what}, layer {layers[layer]}, head {heads[head]}"
        others_H = head_errors(
            np.broadcast_to(got[layer, head], want[layer].shape)[None], want[layer][None]
        )[0]
        others_H[head] = np.inf
        other = int(others_H.argmin())
        if others_H[other] < NEARER * own:
            return Verdict(own, where, f"they are rather those of head {heads[other]}")
        if own > GROSS:
            return Verdict(own, where, f"no rounding does that ({GROSS:g} is allowed)")
    size_LH = np.sqrt((want**2).mean(axis=(2, 3))) + 1e-12
    errors_LHT = np.sqrt(((got - want) ** 2).mean(axis=3)) / size_LH[..., None]
    for layer, head, row in np.argwhere(errors_LHT > ROW_BAR):
        own = float(errors_LHT[layer, head, row])
        apart_TD = want[layer, head] - got[layer, head, row]
        others_T = np.sqrt((apart_TD**2).mean(axis=1)) / size_LH[layer, head]
        others_T[row] = np.inf
        other = int(others_T.argmin())
        if others_T[other] < NEARER**2 * own:
            where = f"{what}, layer {layers[layer]}, head {heads[head]}"
            return Verdict(own, where, f"row {row} is rather row {other}")
    return found
