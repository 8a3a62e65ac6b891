"""What a caller picks along one axis, turned into indices: by label (`sel`) or by place (`isel`).

Knows an axis only as its name and its labels; never knows arrays or objects. Labels are the model's
layer numbers, global head numbers, or positions in a prompt, ascending; a run that holds only some
of them has gaps. A scalar drops the axis, everything else keeps it. Slices are half open, as in
Python, also by label. Negative numbers count from the end of what is held.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store.errors import RunError, SelectionError, SiteNotFound

Indices = NDArray[np.int64]

MAX_LABEL = int(np.iinfo(np.int64).max)
"""No label is larger: a larger number is never there, and must not wrap into one that is."""

Choice = int | slice | Sequence[int] | NDArray[Any] | None
"""None is everything; a boolean array is a mask over the axis."""


@dataclass(frozen=True, slots=True)
class AxisSelection:
    """The picked places of one axis, in the order asked for; `scalar` says that the axis drops."""

    name: str
    indices: Indices
    labels: Indices
    scalar: bool

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, which: slice) -> AxisSelection:
        """Return a stretch of the picked places."""
        return AxisSelection(self.name, self.indices[which], self.labels[which], scalar=False)


def select(
    name: str, labels: Sequence[int] | Indices, choice: Choice, *, by_place: bool = False
) -> AxisSelection:
    """Return what `choice` picks from an axis called `name` that holds `labels`.

    Raises `SelectionError` (positions) or `SiteNotFound` (layers, heads), naming the nearest labels
    there are, and `TypeError` for something that is no selection at all.
    """
    held = np.asarray(labels, dtype=np.int64)
    axis = np.arange(len(held)) if by_place else held
    if choice is None:
        return AxisSelection(name, np.arange(len(held)), held, scalar=False)
    if isinstance(choice, slice):
        indices = np.arange(len(held))[_index_slice(name, axis, choice)]
        return AxisSelection(name, indices, held[indices], scalar=False)
    if isinstance(choice, (str, bytes, bool, np.bool_)):
        raise TypeError(f"{name}={choice!r}: give an int, a list of ints, a slice or None")
    picked = np.asarray(choice)
    if picked.dtype == np.bool_:
        indices = _from_mask(name, picked, len(held))
        return AxisSelection(name, indices, held[indices], scalar=False)
    numbers = choice if isinstance(choice, (list, tuple)) else picked
    if picked.ndim > 1:
        raise TypeError(f"{name}: a selection has one dimension, got {picked.ndim}")
    indices = _find(name, axis, integers(name, numbers), by_place)
    return AxisSelection(name, indices, held[indices], scalar=picked.ndim == 0)


def integers(name: str, values: Any) -> list[int]:
    """Return one integer, or several, as Python's own, of any size; never rounds or wraps.

    Raises `TypeError` for what is no integer: floats, strings, bytes, truth values, None.
    """
    if isinstance(values, np.ndarray):
        if values.size and values.dtype.kind not in "iuO":
            raise TypeError(f"{name}={values!r}: give ints, not {values.dtype}")
        values = values.ravel().tolist()
    is_one = isinstance(values, (str, bytes)) or not isinstance(values, Iterable)
    found = []
    for value in [values] if is_one else values:
        whole = integer(value)
        if whole is None:
            raise TypeError(f"{name}={values!r}: give ints, not {type(value).__name__}")
        found.append(whole)
    return found


def integer(value: object) -> int | None:
    """Return an integer of whatever type as Python's own; None for what is no integer."""
    if isinstance(value, (bool, np.bool_)):
        return None
    whole: int
    try:
        whole = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        array = np.asarray(value)
        if array.ndim or array.dtype.kind not in "iu":
            return None
        whole = array.item()
    return whole


def describe(labels: Sequence[int] | Indices) -> str:
    """Return labels the short way for messages: `0..31`, or a list with its middle left out."""
    values = [int(v) for v in labels]
    if not values:
        return "none"
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}..{values[-1]}"
    if len(values) > 12:
        return ", ".join(map(str, values[:6])) + f", ... {values[-1]} ({len(values)} in all)"
    return ", ".join(map(str, values))


def describe_bare(without_attention: Mapping[str, Sequence[int]]) -> str:
    """Return which of a model's layers have no attention to capture; empty where all have it."""
    kinds = [f"{describe(at)} ({kind})" for kind, at in without_attention.items()]
    return f"without attention: {', '.join(kinds)}" if kinds else ""


def _from_mask(name: str, mask: NDArray[np.bool_], size: int) -> Indices:
    if mask.shape != (size,):
        raise _error(name)(f"{name}: a mask of shape {mask.shape} over {size} held")
    return np.flatnonzero(mask).astype(np.int64)


def _find(name: str, axis: Indices, wanted: Sequence[int], by_place: bool) -> Indices:
    size = len(axis)
    indices = np.empty(len(wanted), np.int64)
    for i, value in enumerate(wanted):
        if value < 0 and -value <= size:
            indices[i] = size + value
            continue
        place = int(np.searchsorted(axis, value)) if 0 <= value <= MAX_LABEL else size
        if value < 0 or place >= size or axis[place] != value:
            raise _error(name)(_not_held(name, axis, value, by_place))
        indices[i] = place
    return indices


def _not_held(name: str, axis: Indices, value: int, by_place: bool) -> str:
    what = f"{name} index" if by_place else name
    if len(axis) == 0:
        return f"{what} {value} is not there: nothing is held along {name}"
    if value < 0:
        return f"{what} {value} counts from the end, but only {len(axis)} are held"
    nearest = sorted(axis.tolist(), key=lambda label: (abs(label - value), label))[:2]
    near = " and ".join(str(label) for label in sorted(nearest))
    return f"{what} {value} is not there; nearest: {near}; held: {describe(axis)}"


def _index_slice(name: str, axis: Indices, choice: slice) -> slice:
    """Turn a slice over labels into one over places; for labels 0..n-1 the two are the same."""
    for bound in (choice.start, choice.stop, choice.step):
        if bound is not None and integer(bound) is None:
            raise TypeError(f"{name}={choice!r}: slice bounds are ints")
    step = 1 if choice.step is None else int(choice.step)
    if step == 0:
        raise ValueError(f"{name}={choice!r}: a slice step is never 0")
    size = len(axis)
    side = "left" if step > 0 else "right"

    def place(bound: Any) -> int | None:
        if bound is None:
            return None
        label: int = min(int(bound), MAX_LABEL)
        if label < 0:
            return max(label + size, -1) if step < 0 else max(label + size, 0)
        found = int(np.searchsorted(axis, label, side=side))  # type: ignore[call-overload]
        return found if step > 0 else found - 1

    start, stop = place(choice.start), place(choice.stop)
    if step < 0:
        # Place -1 means "before the first", which a Python slice can only say by length or None.
        if start is not None and start < 0:
            return slice(0, 0)
        if stop is not None and stop < 0:
            stop = None
    return slice(start, stop, step)


def _error(name: str) -> type[RunError]:
    return SelectionError if "pos" in name or name in ("query", "key") else SiteNotFound
