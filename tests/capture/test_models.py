"""Every family's own attention, as a tiny random checkpoint, against transformers.

One family per semantic runs here each time. `make models` (tests/capture/models_report.py) puts
every family through the same checks, on one rank and two, and writes docs/models.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture.checkpoints.families import FAMILIES
from capture.checkpoints.tiny import tiny
from tests.capture.comparison import (
    assert_block_outputs,
    assert_close,
    assert_matches_reference,
    assert_stored_patterns,
    mixed_values,
)
from tests.capture.hf_reference import HFReference
from tests.capture.live_capture import Captured, LiveCapture, capture_live

pytestmark = pytest.mark.engine

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
TOLERANCE = 2e-5
"""Of the largest value of a layer; of patterns, absolute. Seen: at most 2e-6."""


@dataclass(frozen=True)
class Difference:
    """Where vLLM and transformers differ in what they compute, and how the reference allows it."""

    why: str
    reference: dict[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE


DIFFERENCES = {
    "falcon_alibi": Difference(
        "transformers' eager implementation adds ALiBi twice; compared with its sdpa "
        "implementation, which shows no pattern",
        {"implementation": "sdpa"},
    ),
    "cohere2": Difference(
        "vLLM's window holds one key more; compared with a reference whose window does too",
        {"sliding_window": 13},
    ),
    "bloom": Difference("vLLM's GELU is another approximation", tolerance=1e-3),
}


def checkpoint(family: str) -> Path:
    return tiny(family, MODELS / f"tiny-{family.replace('_', '-')}")


def prompts() -> list[list[list[int]]]:
    """Two units of prompts, the longest longer than any window and than half a step."""
    rng = np.random.default_rng(3)
    return [[rng.integers(3, 320, n).tolist() for n in unit] for unit in ((40, 1, 9), (70, 25))]


CAPTURE = {
    "afmoe": {"sites": ["rot_q", "rot_k", "v", "z", "proj_in"]},
    "qwen3_next": {"sites": ["rot_q", "rot_k", "v", "z", "proj_in"]},
    "gemma2": {"pattern": "float32"},
    "gpt_oss": {"pattern": "float32"},
}
"""What is kept of a family, where it is more than the four sites and W_O."""
UNPROVEN = "afmoe without proj_in"


def wanted_families(folder: Path, families: Iterable[str], ranks: int) -> dict[str, LiveCapture]:
    """Return what is to be captured of each family, and where."""
    engine = {"max_num_batched_tokens": 64, "tensor_parallel_size": ranks, "max_model_len": 256}
    wanted = {
        family: LiveCapture(
            str(folder / family),
            str(checkpoint(family)),
            prompts(),
            engine,
            {"output_weights": True, **CAPTURE.get(family, {})},
        )
        for family in families
        if family != UNPROVEN
    }
    if UNPROVEN in families:
        bare = {"output_weights": True}
        wanted[UNPROVEN] = LiveCapture(
            str(folder / "unproven"), str(checkpoint("afmoe")), prompts(), engine, bare
        )
    return wanted


def capture_families(folder: Path, families: Iterable[str], ranks: int = 1) -> dict[str, Captured]:
    """Capture families one after another in one process."""
    wanted = wanted_families(folder, families, ranks)
    done = capture_live(list(wanted.values()), seconds=60.0 + 40.0 * len(wanted), keep_going=True)
    return dict(zip(wanted, done, strict=True))


def check_family(family: str, captured: Captured) -> dict[str, float]:
    """Assert that a family's rows are transformers' own; return the largest differences."""
    assert captured.error is None, captured.error
    failed = [str(result["error"]).strip() for result in captured.results if result["error"]]
    assert not failed, failed[0].splitlines()[-1]
    assert len(captured.results) == 2
    run = captured.run
    difference = DIFFERENCES.get(family, Difference(""))
    reference = HFReference(captured.wanted.model, **difference.reference)
    worst: dict[str, float] = {}
    try:
        for number in range(5):
            prompt = f"p{number}"
            layers = reference.layers(captured.wanted.ids(number))
            errors = assert_matches_reference(run, prompt, layers, difference.tolerance)
            if "pattern" in CAPTURE.get(family, {}):
                assert_stored_patterns(run, prompt, 1e-6)
            mixed, z = mixed_values(run, prompt)
            errors["pattern @ v"] = assert_close(f"z of {prompt}", mixed, z, TOLERANCE)
            errors["sum"] = assert_block_outputs(run, prompt, reference, difference.tolerance)
            worst = {site: max(worst.get(site, 0.0), error) for site, error in errors.items()}
    finally:
        reference.close()
    return worst


IN_CI = [name for name, family in FAMILIES.items() if family.in_ci]
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@pytest.fixture(scope="module")
def ci_captures(tmp_path_factory) -> dict[str, Captured]:
    return capture_families(tmp_path_factory.mktemp("families"), [*IN_CI, UNPROVEN])


@pytest.mark.parametrize("family", IN_CI)
def test_a_family_is_stored_as_transformers_computes_it(family: str, ci_captures) -> None:
    check_family(family, ci_captures[family])


def test_contributions_of_gated_heads_go_through_the_gate(ci_captures) -> None:
    run = ci_captures["afmoe"].run
    z, taken = (run.read(site, prompt="p0").values for site in ("z", "proj_in"))
    assert np.abs(z - taken).max() > 0.1 * np.abs(z).max(), "the gate is open: this proves nothing"
    contribution = run.contribution("p0", 1, head=2)
    w_o_DM = run._output_projection(1).w_o_HDM[2]
    np.testing.assert_allclose(contribution, taken[1, 2] @ w_o_DM, atol=1e-5)


def test_contributions_and_the_bias_make_up_the_blocks_output(ci_captures) -> None:
    run = ci_captures["gpt_neox"].run
    bias_M = run.output_bias(1).values
    output_TM = run.contribution("p0", 1).sum("head").values
    assert np.abs(bias_M).max() > 0.01 * np.abs(output_TM).max(), "no bias to speak of"
    assert not ci_captures["afmoe"].run.output_bias(1).values.any()


def test_contributions_of_a_gated_model_need_the_gate(ci_captures) -> None:
    assert "add proj_in to capture.sites" in ci_captures[UNPROVEN].error
