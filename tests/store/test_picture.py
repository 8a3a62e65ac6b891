"""The picture of a pattern: labels, thinning, refusals, and that it shows what it was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from store import picture
from store.picture import MAX_LABELS, _short, draw_pattern, tick_places, visible_token


def pattern(tokens: list[str]) -> xr.DataArray:
    size = len(tokens)
    values_QK = np.tril(np.full((size, size), 1 / max(size, 1), np.float32))
    labels = np.array(tokens, object)
    places = np.arange(size)
    return xr.DataArray(
        values_QK,
        dims=("query_pos", "key_pos"),
        coords={
            "query_pos": places,
            "key_pos": places,
            "query_token": ("query_pos", labels),
            "key_token": ("key_pos", labels),
            "layer": 3,
            "head": 5,
            "prompt": "p$\\frac$x",
        },
    )


@pytest.mark.parametrize("size", [1, 9, 70])
def test_draws_a_png(tmp_path, size: int) -> None:
    tokens = [" The", "\n", "東", "🙂", "$\\frac$", "नम", "", "a" * 40, "\x00"]
    path = draw_pattern(
        pattern((tokens * 8)[:size]), tmp_path / "deep" / "a.png", model="some/model"
    )
    image = imread(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert image.shape[0] > 400
    assert image.shape[1] > 400
    assert len(np.unique(image[..., :3].reshape(-1, 3), axis=0)) > 10
    assert share_of(image, picture._NAN) == 0


def share_of(image: np.ndarray, colour: str) -> float:
    """How many of the picture's points have this colour."""
    return np.all(np.abs(image[..., :3] - np.array(to_rgb(colour))) < 0.02, axis=-1).sum()


@pytest.mark.parametrize("hole", [(8, 2), (2, 8), ...])
def test_a_nan_is_seen_and_said_and_the_rest_is_drawn(tmp_path, monkeypatch, hole: Any) -> None:
    titles: list[str] = []
    draw = picture._figure
    monkeypatch.setattr(picture, "_figure", lambda *parts: titles.append(parts[-1]) or draw(*parts))
    broken = pattern(["a"] * 9)
    broken[hole] = np.nan
    image = imread(draw_pattern(broken, tmp_path / "broken.png", model="m"))
    nans = int(np.isnan(broken.values).sum())
    assert titles[0].endswith(f"{nans} of 81 entries are NaN (orange)")
    cell = share_of(image, picture._NAN) / nans
    assert cell > 500
    if hole is not ...:
        # The other 44 or 45 entries share one value, the largest.
        assert share_of(image, picture._COLOURS[-1]) / cell > 40


def test_an_infinity_does_not_hide_the_other_entries(tmp_path) -> None:
    broken = pattern(["a"] * 9)
    broken[1, 0] = np.inf
    image = imread(draw_pattern(broken, tmp_path / "a.png", model="m"))
    assert share_of(image, picture._COLOURS[-1]) > 20_000


def test_a_picture_that_cannot_be_written_leaves_no_folder(tmp_path) -> None:
    for name in ("a/b/" + "n" * 300 + ".png", "a/b/c/.."):
        with pytest.raises(OSError, match=r"too long|directory"):
            draw_pattern(pattern(["a"]), tmp_path / name, model="m")
    assert list(tmp_path.iterdir()) == []


def test_tokens_are_made_visible() -> None:
    assert visible_token(" the") == "·the"
    assert visible_token("\n\t") == "↵⇥"
    assert visible_token("") == "∅"
    assert visible_token("\x07") == "‹7›"
    assert len(visible_token("x" * 50)) == 14


def test_a_model_that_is_a_path_is_called_by_its_last_part() -> None:
    assert _short("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert _short(".cache/models/smollm2-135m") == "smollm2-135m"
    assert _short("/data/m/") == "m"


def test_ticks_are_thinned_above_the_limit() -> None:
    assert tick_places(MAX_LABELS).tolist() == list(range(MAX_LABELS))
    for count in (MAX_LABELS + 1, 1000, 4097):
        places = tick_places(count)
        assert len(places) <= MAX_LABELS
        assert len(set(np.diff(places))) == 1


def test_refuses_what_is_not_one_head() -> None:
    with pytest.raises(ValueError, match="pick one layer and one head"):
        draw_pattern(pattern(["a"]).expand_dims("head"), "x.png", model="m")
    with pytest.raises(ValueError, match="no entries"):
        draw_pattern(pattern([]), "x.png", model="m")
