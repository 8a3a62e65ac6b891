"""A picture of one head's attention pattern, its tokens as labels.

Knows one labelled pattern (`Run.pattern` of one prompt, layer and head) and a title; never reads a
run. White space in tokens is made visible, and scripts that no installed font has are shown as code
points rather than as empty boxes. A NaN has a colour that no value has, and the title counts them.
Draws without a display and without pyplot's global state.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from numpy.typing import NDArray

from store.new_folder import new_parents

MAX_LABELS = 64
MAX_LABEL_CHARACTERS = 14
_COLOURS = ("#ffffff", "#d6e6f4", "#7ab6d9", "#2a7ab9", "#0b4a8f", "#06224a")
_MASKED = "#ececee"
_NAN = "#e8590c"
_VISIBLE = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "▁": "·", "Ġ": "·", "Ċ": "↵"}
_FALLBACK_FAMILIES = (
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Zen Hei",
    "Noto Emoji",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
)


def draw_pattern(pattern: xr.DataArray, path: str | Path, *, model: str) -> Path:
    """Write a PNG of a pattern with dims (query_pos, key_pos) and return its path.

    `pattern` is `run.pattern(prompt, layer, head)`: its coordinates give title and labels. Up to
    64 tokens each row and column is labelled, above that every n-th. `model` is a name or a path.
    Raises `ValueError` for other dimensions.
    """
    if pattern.dims != ("query_pos", "key_pos"):
        raise ValueError(
            f"one head's pattern has dims (query_pos, key_pos), got {pattern.dims}; "
            "pick one layer and one head"
        )
    values_QK = np.asarray(pattern.values, np.float32)
    if values_QK.size == 0:
        raise ValueError("there is nothing to draw: the pattern has no entries")
    queries, keys = (
        [visible_token(str(token)) for token in pattern[name].values]
        for name in ("query_token", "key_token")
    )
    title = (
        f"{_short(model)}   layer {int(pattern['layer'])}   head {int(pattern['head'])}\n"
        f"prompt {_drawable(str(pattern['prompt'].item()))}"
    )
    if nans := int(np.isnan(values_QK).sum()):
        title += f"   {nans} of {values_QK.size} entries are NaN (orange)"
    with mpl.rc_context({"font.family": _families(), "svg.fonttype": "none"}):
        figure = _figure(values_QK, queries, keys, pattern, title)
        drawn = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            canvas: Any = FigureCanvasAgg(figure)
            canvas.print_png(drawn, metadata={"Title": title})
    target = Path(path)
    with new_parents(target):
        target.write_bytes(drawn.getvalue())
    return target


def visible_token(token: str) -> str:
    """Return a token as a label: white space visible, control and undrawable characters as code."""
    shown = "".join(_VISIBLE.get(character, character) for character in token)
    shown = _drawable(shown)
    if len(shown) > MAX_LABEL_CHARACTERS:
        shown = shown[: MAX_LABEL_CHARACTERS - 1] + "…"
    return shown or "∅"


def tick_places(count: int, limit: int = MAX_LABELS) -> NDArray[np.int64]:
    """Return which of `count` tokens get a label: all up to `limit`, else every n-th."""
    step = max(1, -(-count // limit))
    return np.arange(0, count, step)


def _figure(
    values_QK: NDArray[np.float32],
    queries: Sequence[str],
    keys: Sequence[str],
    pattern: xr.DataArray,
    title: str,
) -> Figure:
    num_queries, num_keys = values_QK.shape
    cell = 0.20
    width = float(np.clip(num_keys * cell, 3.2, 11.0))
    height = float(np.clip(num_queries * cell, 3.2, 11.0))
    cell_inches = min(width / min(num_keys, MAX_LABELS), height / min(num_queries, MAX_LABELS))
    size = float(np.clip(72 * 0.62 * cell_inches, 5.0, 9.0))
    figure = Figure(figsize=(width + 2.6, height + 2.2), dpi=160, layout="constrained")
    axes = figure.subplots()
    q_pos, k_pos = (np.asarray(pattern[name].values) for name in ("query_pos", "key_pos"))
    hidden_QK = k_pos[None, :] > q_pos[:, None]
    nan_QK = np.isnan(values_QK)
    colours = LinearSegmentedColormap.from_list("attention", _COLOURS).with_extremes(bad=_MASKED)
    image = axes.imshow(
        np.where(hidden_QK, np.float32(np.nan), values_QK),
        cmap=colours,
        vmin=0,
        vmax=float(values_QK.max(initial=1e-6, where=np.isfinite(values_QK))),
        aspect="auto",
        interpolation="nearest",
    )
    if nan_QK.any():
        # Whatever their place: a NaN behind the mask is none that attention can have made.
        axes.imshow(
            np.where(nan_QK, np.float32(1), np.float32(np.nan)),
            cmap=ListedColormap([_NAN]),
            aspect="auto",
            interpolation="nearest",
        )
    for axis, labels, positions in ((axes.yaxis, queries, q_pos), (axes.xaxis, keys, k_pos)):
        places = tick_places(len(labels))
        thinned = len(places) < len(labels)
        axis.set_ticks(
            places,
            [f"{labels[p]}  {positions[p]}" if thinned else labels[p] for p in places],
            fontsize=size,
            parse_math=False,
        )
    axes.tick_params(axis="x", rotation=90)
    axes.tick_params(length=2, width=0.5, color="#888888")
    if max(num_queries, num_keys) <= MAX_LABELS:
        axes.set_xticks(np.arange(-0.5, num_keys), minor=True)
        axes.set_yticks(np.arange(-0.5, num_queries), minor=True)
        axes.grid(which="minor", color=_MASKED, linewidth=0.4)
        axes.tick_params(which="minor", length=0)
    axes.set_xlabel("key (attended to)", fontsize=9, color="#444444")
    axes.set_ylabel("query", fontsize=9, color="#444444")
    for spine in axes.spines.values():
        spine.set_visible(False)
    heading, _, under = title.partition("\n")
    figure.suptitle(heading, fontsize=11, fontweight="bold", x=0.02, ha="left", parse_math=False)
    axes.set_title(under, fontsize=8.5, color="#555555", loc="left", parse_math=False)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=30, pad=0.015)
    bar.set_label("attention", fontsize=8.5, color="#444444")
    bar.ax.tick_params(labelsize=7.5, length=2)
    bar.outline.set_visible(False)
    return figure


def _short(model: str) -> str:
    """Return a hub name as it is, and the last part of a path: folders say nothing of a model."""
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return _drawable(model.rstrip("/").rsplit("/", 1)[-1] if is_path else model)


def _drawable(text: str) -> str:
    glyphs = _glyphs()
    return "".join(c if ord(c) in glyphs and c.isprintable() else f"‹{ord(c):x}›" for c in text)


@cache
def _families() -> list[str]:
    """Return the installed ones of the families that are tried in turn for each glyph."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in _FALLBACK_FAMILIES if name in installed] or ["DejaVu Sans"]


@cache
def _glyphs() -> frozenset[int]:
    """Return every code point that one of the families can draw."""
    found: set[int] = set()
    for family in _families():
        path: Any = font_manager.findfont(family)
        found |= set(FT2Font(str(path)).get_charmap())
    return frozenset(found)
