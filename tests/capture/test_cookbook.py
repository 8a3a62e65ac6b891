"""docs/cookbook.md, run top to bottom on captures of two models, against transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.capture.hf_reference import HFReference
from tests.capture.live_capture import Captured

pytestmark = pytest.mark.engine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cookbook.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
CHOSEN = {"prompt": "p0", "layer": 1, "head": 2}


def run_page(captured: Captured, generated: Captured) -> dict[str, Any]:
    """Run the page's blocks, top to bottom, and return what they leave."""
    names: dict[str, Any] = {"RUN": captured.wanted.out, **CHOSEN}
    names["GENERATED_RUN"] = generated.wanted.out
    for block in BLOCKS:
        exec(compile(block, PAGE.name, "exec"), names)
    return names


def assert_near(got: Any, want: np.ndarray, tolerance: float = 1e-3) -> None:
    got = np.asarray(got)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * max(1.0, float(np.abs(want).max()))


@pytest.mark.parametrize("model", ["smollm2", "tiny_qwen3"])
@pytest.mark.parametrize("ranks", ["one", "several"])
def test_the_page_computes_what_the_model_does(model: str, ranks: str, request) -> None:
    several = {"smollm2": "smollm2_3", "tiny_qwen3": "tiny_qwen3_2"}
    fixture = several[model] if ranks == "several" else f"{model}_1"
    captured = request.getfixturevalue(fixture)
    captured = captured["plain"] if isinstance(captured, dict) else captured
    fixture, key = {
        ("smollm2", "one"): ("smollm2_on_1", 1),
        ("smollm2", "several"): ("smollm2_on_3", 1),
        ("tiny_qwen3", "one"): ("tiny_generated", "greedy"),
        ("tiny_qwen3", "several"): ("tiny_qwen3_on_2", 1),
    }[model, ranks]
    generated = request.getfixturevalue(fixture)[key]
    reference: HFReference = request.getfixturevalue(f"{model}_reference")
    names = run_page(captured, generated)

    layers = reference.layers(captured.wanted.ids(0))
    layer, head = layers[CHOSEN["layer"]], CHOSEN["head"]
    for name in ("q", "k", "v", "pre_q", "pre_k"):
        assert_near(names[name], layer.site({"q": "rot_q", "k": "rot_k"}.get(name, name)))
    assert_near(names["probs"], layer.pattern_HTT)
    assert_near(names["by_hand"], layer.pattern_HTT)
    assert_near(names["last_row"], layer.pattern_HTT[head, -1])
    masked = np.triu(np.ones(layer.pattern_HTT.shape[1:], bool), 1)
    assert np.all(np.isneginf(names["scores"].values[:, masked]))
    assert_near(names["z"], layer.z_HTD)
    assert names["error"] < 1e-4 * np.abs(layer.z_HTD).max()
    assert_near(names["block_output"], reference.block_outputs[CHOSEN["layer"]])
    weights = dict(reference.model.named_modules())[f"model.layers.{CHOSEN['layer']}.self_attn"]
    size = layer.z_HTD.shape[-1]
    slice_MD = weights.o_proj.weight.detach().numpy()[:, head * size : (head + 1) * size]
    assert_near(names["contribution"], layer.z_HTD[head] @ slice_MD.T)
    assert_near(names["patterns"], np.stack([layers[0].pattern_HTT, layers[2].pattern_HTT]))
    assert_generation(names, reference)


def assert_generation(names: dict[str, Any], reference: HFReference) -> None:
    tokens, rows = names["tokens"], names["decode_rows"]
    pattern_HTT = reference.layers(tokens.ids[:-1])[CHOSEN["layer"]].pattern_HTT
    assert len(rows) == tokens.num_generated == len(names["said"])
    for row in rows:
        pos = int(row["query_pos"])
        assert_near(row, pattern_HTT[:, pos, : pos + 1])
