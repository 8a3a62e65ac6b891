"""A prompt whose rows are NaN leaves no trace in those that get its blocks of KV cache after it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.capture.hf_reference import HFReference
from tests.capture.live_capture import Captured, LiveCapture, capture_live

pytestmark = pytest.mark.engine

OVERFLOWS = 9
BAD, PROMPTS = 12, 160


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_qwen3_dir: Path) -> Path:
    """The tiny Qwen3, which gives NaN for one token."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("overflows") / "model"
    shutil.copytree(tiny_qwen3_dir, folder)
    weights = load_file(folder / "model.safetensors")
    (embedding,) = (name for name in weights if "embed" in name)
    weights[embedding][OVERFLOWS] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def captured(tmp_path_factory, model: Path) -> Captured:
    """Prompts, one of them NaN, through a cache each block of which is used again."""
    random = np.random.default_rng(3)
    lengths = random.integers(3, 60, PROMPTS)
    lengths[BAD] = 62
    prompts = [random.integers(OVERFLOWS + 1, 320, n).tolist() for n in lengths]
    prompts[BAD][0] = OVERFLOWS
    options = {"num_gpu_blocks_override": 20, "block_size": 32}
    wanted = LiveCapture(
        str(tmp_path_factory.mktemp("stale") / "run"),
        str(model),
        [prompts[:60], prompts[60:]],
        {"max_num_batched_tokens": 128, "max_num_seqs": 4, "options": options},
    )
    return capture_live([wanted])[0]


def test_innocent_prompts_are_what_they_are_without_it(captured: Captured, model: Path) -> None:
    reference = HFReference(model)
    run = captured.run
    for prompt in range(PROMPTS):
        z = run.read("z", prompt=prompt).values
        if prompt == BAD:
            assert np.isnan(z).any()
            continue
        for got, want in zip(z, reference.layers(captured.wanted.ids(prompt)), strict=True):
            np.testing.assert_allclose(got, want.z_HTD, atol=1e-4, err_msg=f"prompt {prompt}")
    reference.close()
