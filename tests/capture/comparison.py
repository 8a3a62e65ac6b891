"""Stored rows against a reference, every layer and head, with errors that say where they differ.

Legend: L layers, H heads, T tokens, D head size, N query heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from store import rebuild
from store.site_names import NamedSite
from tests.capture.hf_reference import HFReference, LayerReference

SITES = ("rot_q", "rot_k", "v", "z")


def stored_sites(run: Any, prompt: str) -> dict[str, np.ndarray]:
    """Return what a run holds of a prompt, float32, and the pattern rebuilt from it."""
    sites = [*SITES, *(site for site in run.sites if site not in SITES)]
    arrays = {site: run.read(site, prompt=prompt, dtype=np.float32).values for site in sites}
    return {**arrays, "pattern": run.pattern(prompt).values}


def assert_stored_patterns(run: Any, prompt: str, within: float) -> None:
    """Assert that a prompt's stored pattern is what its stored rot_q and rot_k give when read."""
    stored = run._index.stored(prompt)
    attention = run._attention(NamedSite("pattern"), stored, (None,) * 4)
    assert [array.site for array in attention.arrays] == ["pattern"]
    stored_LNQK = run.pattern(prompt).values
    q, k = (run._arrays.of(stored, site) for site in ("rot_q", "rot_k"))
    rebuilt_LNQK = rebuild.attention("pattern", run.model.layers, q, k, attention.picked)
    assert stored_LNQK.shape == rebuilt_LNQK.shape
    assert stored_LNQK.max() > 0.1
    error = float(np.abs(stored_LNQK - rebuilt_LNQK).max())
    assert error <= within, f"the stored pattern of {prompt} and the rebuilt one differ by {error}"


def assert_matches_reference(
    run: Any, prompt: str, layers: list[LayerReference], tolerance: float = 1e-3
) -> dict[str, float]:
    """Assert that sites (relative to their largest value) and patterns (absolute) are the model's.

    Returns the largest difference of each site.
    """
    worst: dict[str, float] = {}
    for site, values in stored_sites(run, prompt).items():
        wanted = [layer.site(site) for layer in layers]
        if all(value is not None for value in wanted):
            worst[site] = assert_close(f"{site} of {prompt}", values, np.stack(wanted), tolerance)
    assert "z" in worst
    return worst


def assert_close(name: str, got_LHXX: np.ndarray, want_LHXX: np.ndarray, tolerance: float) -> float:
    """Assert that every layer and head is within `tolerance` of the layer's largest value."""
    assert got_LHXX.shape == want_LHXX.shape, name
    worst = 0.0
    for layer, (got, want) in enumerate(zip(got_LHXX, want_LHXX, strict=True)):
        size = 1.0 if name.startswith("pattern") else float(np.abs(want).max())
        errors_H = np.abs(got - want).reshape(len(got), -1).max(axis=1) / size
        assert np.all(errors_H < tolerance), f"{name}, layer index {layer}, by head: {errors_H}"
        worst = max(worst, float(errors_H.max()))
    return worst


def assert_block_outputs(run: Any, prompt: str, reference: HFReference, tolerance: float) -> float:
    """Assert that all heads' contributions and W_O's bias are what the attention block gave.

    `reference` has just run the prompt. Returns the largest difference, relative.
    """
    assert len(reference.block_outputs) == len(run.layers)
    worst = 0.0
    for layer, output_TM in zip(run.layers, reference.block_outputs, strict=True):
        got_TM = run.contribution(prompt, layer).sum("head") + run.output_bias(layer)
        error = float(np.abs(got_TM.values - output_TM).max() / np.abs(output_TM).max())
        assert error < tolerance, f"the block's output of {prompt}, layer {layer}: {error}"
        worst = max(worst, error)
    return worst


def mixed_values(run: Any, prompt: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (pattern @ v, z) of a prompt, [L, N, T, D], from stored data alone."""
    stored = stored_sites(run, prompt)
    group = stored["z"].shape[1] // stored["v"].shape[1]
    return stored["pattern"] @ stored["v"].repeat(group, axis=1), stored["z"]
