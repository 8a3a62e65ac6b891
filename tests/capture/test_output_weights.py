"""W_O as an engine stores it at its start: what another run left there is replaced, nothing else.

The engine below is scripted: it hands out W_O that was made up, and notes what it was asked for.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from capture.commit_unit import CaptureShape
from capture.engine import CaptureEngine
from capture.errors import UnsupportedModel
from capture.rows import Span
from capture.settings import CaptureSettings, StoreLocation
from store.objects.local import LocalStore
from store.run_format import LayerSemantics, Site
from store.weights import (
    OutputProjection,
    read_output_projection,
    weight_key,
    write_output_projection,
)
from tests.capture.random_engine import HEADS, SIZE, start, task

RUN_ID = "a" * 16
OTHER = "b" * 16
HIDDEN = 6
LAYERS = tuple(
    LayerSemantics(
        layer=number,
        module="a",
        num_heads=2,
        num_kv_heads=1,
        head_size=4,
        v_head_size=4,
        scale=1.0,
    )
    for number in (0, 3)
)


class ScriptedEngine:
    """Holds W_O of two layers, in one rank's parts."""

    def __init__(self) -> None:
        config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["Scripted"]), get_hidden_size=lambda: HIDDEN
        )
        self.vllm_config = SimpleNamespace(model_config=config)
        self.asked: list[int] = []

    def call(self, method: str, *args: Any) -> list[Any]:
        assert method == "capture_output_projection"
        self.asked.append(args[0])
        return [(own(args[0]).reshape(8, HIDDEN).view(np.uint8), None)]


def own(layer: int) -> np.ndarray:
    return np.random.default_rng(layer).standard_normal((2, 4, HIDDEN)).astype(np.float32)


def store_weights(folder: Path) -> list[int]:
    """Return the layers whose W_O the engine was asked for; all are the run's own afterwards."""
    scripted: Any = ScriptedEngine()
    shape = CaptureShape(RUN_ID, "float32", LAYERS, CaptureSettings(), ())
    engine = CaptureEngine(scripted, shape, StoreLocation(str(folder)))
    engine.store_output_weights()
    for layer in LAYERS:
        held = read_output_projection(LocalStore(folder), layer.layer, RUN_ID)
        assert held.w_o_HDM.tobytes() == own(layer.layer).tobytes()
        assert held.bias_M is None
    return list(scripted.asked)


def test_each_layer_of_a_shared_projection_is_held_to_take_z(tmp_path: Path) -> None:
    """It is called once for each layer that shares it, and every layer hears of every call."""
    watched: list[Any] = []
    budget = {"host_bytes": 64 << 20, "slot_bytes": 1 << 20}
    settings = CaptureSettings(sites=(Site.Z,), output_weights=True, **budget)
    capture = start(
        tmp_path / "run",
        settings,
        watch_output=lambda _layer, on_input: watched.append(on_input),
    )
    try:
        capture.admit(task(0, 0, [3]))
        rank: Any = capture.step_engine.rank
        assert rank.begin_step([Span(0, 0, 0, 3)])
        for tap in (0, 1):
            z_TF = torch.randn(3, HEADS * SIZE)
            rank.put(tap, z_TF)
            if tap:
                with pytest.raises(UnsupportedModel, match="does not take z as it is"):
                    watched[tap](2 * z_TF)
            for on_input in watched:
                on_input(z_TF)
    finally:
        capture.shutdown()


def test_w_o_is_stored_once(tmp_path: Path) -> None:
    assert store_weights(tmp_path) == [0, 3]
    assert store_weights(tmp_path) == []
    LocalStore(tmp_path).delete(weight_key(0))
    assert store_weights(tmp_path) == [0]


OTHERS = {
    "another run's": lambda data: data.replace(RUN_ID.encode(), OTHER.encode()),
    "another layer's": lambda data: data.replace(b'"layer": "3"', b'"layer": "2"'),
    "one that names no run": lambda data: data.replace(
        b', "run_id": "' + RUN_ID.encode() + b'"', b" " * (len(RUN_ID) + 14)
    ),
    "cut short": lambda data: data[:-4],
    "nothing": lambda data: b"",
    "of another type": lambda data: data.replace(b"F32", b"F16"),
    "of other heads": lambda data: data.replace(b'"heads": "2"', b'"heads": "4"'),
    "no safetensors": lambda data: b"x" * len(data),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_not_the_runs_own_is_replaced(tmp_path: Path, what: str) -> None:
    assert store_weights(tmp_path) == [0, 3]
    objects = LocalStore(tmp_path)
    whole = objects.get(weight_key(3), max_bytes=1 << 20)
    changed = OTHERS[what](whole)
    assert changed != whole
    objects.put(weight_key(3), [changed])
    assert store_weights(tmp_path) == [3]
    assert objects.get(weight_key(3), max_bytes=1 << 20) == whole


@pytest.mark.parametrize("shape", [(2, 4, 12), (4, 2, 6), (1, 4, 6), (3, 4, 6)])
def test_one_of_another_model_is_replaced(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    values = np.ones(shape, np.float32)
    write_output_projection(LocalStore(tmp_path), OutputProjection(3, values), OTHER)
    assert store_weights(tmp_path) == [0, 3]
    write_output_projection(LocalStore(tmp_path), OutputProjection(3, values), OTHER)
    assert store_weights(tmp_path) == [3]
