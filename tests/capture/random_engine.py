"""A capture engine around a real rank whose model is random numbers: no vLLM, no weights, fast.

Everything from the staged tensors to the commit is real; only requests and forward passes are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from capture.adapters.vllm_engine import Finished
from capture.attention_layers import LocalLayer, merge_semantics
from capture.commit_unit import CaptureShape
from capture.engine import CaptureEngine
from capture.rank import RankCapture
from capture.rows import Span
from capture.settings import CaptureSettings, PromptTask, StoreLocation, UnitTask

HEADS, KV_HEADS, SIZE = 4, 2, 16
VOCABULARY = 100


class RandomEngine:
    """Stands in for `StepEngine`: computes waiting prompts whole, as many as fit a step."""

    def __init__(
        self,
        settings: CaptureSettings,
        num_layers: int,
        step_rows: int,
        more_layers: Sequence[LocalLayer] = (),
        watch_output: Callable[..., None] = lambda *_: None,
    ) -> None:
        layers = [
            LocalLayer(n, f"l{n}", HEADS, KV_HEADS, SIZE, SIZE, 0.25, None, None, None, None)
            for n in range(num_layers)
        ]
        layers += more_layers
        self.rank = RankCapture(
            settings=settings,
            layers=layers,
            envoy_of=lambda path: path,
            watch_projection=lambda *_: None,
            watch_output=watch_output,
            rank=0,
            num_ranks=1,
            total_heads=HEADS,
            total_kv_heads=KV_HEADS,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_step_rows=step_rows,
        )
        model = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["Random"]),
            get_hidden_size=lambda: HEADS * SIZE,
            max_model_len=1 << 20,
        )
        self.vllm_config = SimpleNamespace(model_config=model)
        self.step_rows = step_rows
        self.slow_step = 0.0
        self._queue: list[tuple[int, int, int]] = []

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def add(self, unit: int, prompt: int, token_ids: np.ndarray, **_: Any) -> None:
        self._queue.append((unit, prompt, len(token_ids)))

    def abort(self, unit: int) -> None:
        self._queue = [one for one in self._queue if one[0] != unit]

    def step(self) -> list[Finished]:
        time.sleep(self.slow_step)
        spans: list[Span] = []
        while self._queue and sum(s.num_rows for s in spans) + self._queue[0][2] <= self.step_rows:
            unit, prompt, length = self._queue.pop(0)
            spans.append(Span(unit, prompt, 0, length))
        rows = sum(span.num_rows for span in spans)
        if self.rank.begin_step(spans):
            tap = 0
            for _ in self.rank.taken:
                for site in self.rank.sites:
                    self.rank.put(tap, torch.randn(rows, site.share.local * site.head_size))
                    tap += 1
        self.rank.end_step(None)
        return [Finished(span.unit, span.prompt, None) for span in spans if span.unit is not None]

    def call(self, method: str, *args: Any) -> list[Any]:
        name = method.removeprefix("capture_")
        if name == "seal_unit":
            return [self.rank.seal_unit(args[0], args[1] if len(args) > 1 else None)]
        called: Callable[..., Any] = getattr(self.rank, name)
        return [called(*args)]

    def shutdown(self) -> None:
        self.rank.close()


def start(
    folder: Path,
    settings: CaptureSettings,
    num_layers: int = 2,
    step_rows: int = 256,
    watch_output: Callable[..., None] = lambda *_: None,
) -> CaptureEngine:
    """Return an engine that captures into `folder`."""
    engine = RandomEngine(settings, num_layers, step_rows, watch_output=watch_output)
    location = StoreLocation(str(folder))
    facts = engine.rank.facts()
    semantics = merge_semantics([facts.layers], HEADS, KV_HEADS)
    engine.rank.open(location)
    shape = CaptureShape("00" * 8, "float32", tuple(semantics), settings, (facts,))
    return CaptureEngine(engine, shape, location)  # type: ignore[arg-type]


def task(unit: int, first: int, lengths: list[int]) -> UnitTask:
    """Return a unit of random prompts."""
    draw = np.random.default_rng(unit)
    prompts = tuple(PromptTask(draw.integers(0, VOCABULARY, n).astype(np.int32)) for n in lengths)
    return UnitTask(unit, "a", first, prompts)
