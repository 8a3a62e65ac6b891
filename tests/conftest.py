"""What every test may ask for: model folders made once under .cache/, and a quiet, small process.

Set before anything imports torch, Ray or a tokenizer: thread pools of one, no hub, no telemetry.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.lots import ROOT, lot

# How long an example takes says how busy the machine is, and nothing of the code.
hypothesis.settings.register_profile("any-machine", deadline=None)
hypothesis.settings.load_profile("any-machine")

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's object store holds no tensors here; do not let a small /dev/shm stop the tests.
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
    # Ranks talk through /dev/shm: ten chunks of this size, so that 64 MB of it are enough.
    "VLLM_MQ_MAX_CHUNK_BYTES_MB": "2",
    "MPLBACKEND": "Agg",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

MODELS = ROOT / ".cache" / "models"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each of the processes that run side by side one lot."""
    from xdist.scheduler import LoadScopeScheduling

    class TwoLots(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lot(nodeid.partition("::")[0])

    return TwoLots(config, log)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in float32: 30 layers, 9 query heads, 3 kv heads, head size 64."""
    from capture.checkpoints.smollm2 import prepare_smollm2

    return prepare_smollm2(MODELS / "smollm2-135m")


@pytest.fixture(scope="session")
def tiny_qwen3_dir() -> Path:
    """A tiny random Qwen3 in float32: 3 layers, 8 to 2 heads of size 32, QK-norm."""
    from capture.checkpoints.tiny import tiny_qwen3

    return tiny_qwen3(MODELS / "tiny-qwen3")


@pytest.fixture(scope="session")
def tiny_qwen3_bf16_dir() -> Path:
    """The same tiny Qwen3 with bfloat16 weights."""
    from capture.checkpoints.tiny import tiny_qwen3

    return tiny_qwen3(MODELS / "tiny-qwen3-bf16", dtype="bfloat16")
