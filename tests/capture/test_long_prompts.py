"""A prompt of 33,000 tokens, computed in pieces beside short ones, is stored like any other.

Its eager pattern would not fit in memory: the reference is transformers' fused attention, whose z
is seen at W_O's input; patterns are rebuilt for single queries only.

Legend: T tokens, H heads, D head size, Q queries.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.capture.hf_reference import HFReference
from tests.capture.live_capture import LiveCapture, capture_live
from tests.conftest import MODELS

pytestmark = pytest.mark.engine

TOKENS = 33_000
STEP = 2048
LATE = [0, 1, STEP - 1, STEP, 20_000, 32_767, 32_768, TOKENS - 1]


@pytest.fixture(scope="module")
def model():
    from capture.checkpoints.tiny import tiny_qwen3

    return tiny_qwen3(
        MODELS / "tiny-qwen3-long",
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=40_960,
    )


def test_a_prompt_of_many_steps_is_stored_whole(model, tmp_path) -> None:
    draw = np.random.default_rng(0)
    lengths = [300, TOKENS, 7]
    prompts = [draw.integers(2, 320, length).tolist() for length in lengths]
    engine = {"max_model_len": TOKENS + 8, "max_num_batched_tokens": STEP}
    captured = capture_live([LiveCapture(str(tmp_path / "run"), str(model), [prompts], engine)])[0]
    assert [result["status"] for result in captured.results] == ["committed"]
    assert captured.staged_rows == [sum(lengths)]
    run = captured.run
    reference = HFReference(model, "sdpa")
    try:
        for number, ids in enumerate(prompts):
            reference.layers(ids)
            for layer, into_output in enumerate(reference._into_output):
                want_HTD = into_output.reshape(len(ids), 2, -1).swapaxes(0, 1)
                z_HTD = run.read("z", prompt=f"p{number}", layer=layer).values
                assert np.abs(z_HTD - want_HTD).max() < 1e-3 * np.abs(want_HTD).max()
    finally:
        reference.close()
    for layer in range(2):
        pattern_HQT = run.pattern("p1", layer=layer, query=LATE).values
        v_TD = run.read("v", prompt="p1", layer=layer, head=0).values
        z_HQD = run.read("z", prompt="p1", layer=layer, pos=LATE).values
        assert np.abs(pattern_HQT @ v_TD - z_HQD).max() < 1e-4 * np.abs(z_HQD).max()
