"""vLLM worker classes that carry nnsight's runner and our capture, on CUDA and on the CPU.

vLLM is told the class by name (`worker_cls`) and builds one per rank; a worker extension would
clash with nnsight, which mounts `.save` on `object`. The engine's settings travel in
`additional_config`, which holds no storage options: those come by RPC and are never logged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from capture.adapters.cpu_generator import make_rewindable
from capture.adapters.nnsight_block import envoy_of
from capture.adapters.projections import (
    output_bias,
    output_projection,
    watch_output,
    watch_projection,
)
from capture.adapters.vllm_config import text_config, total_query_heads
from capture.adapters.vllm_runner import StepCaptureRunner
from capture.assembly import RankReport
from capture.attention_layers import find_attention_layers
from capture.layer_kinds import layer_kinds
from capture.rank import RankCapture, RankFacts
from capture.rows import UnitLayout
from capture.settings import CaptureSettings, StoreLocation

CONFIG_KEY = "attnstore"


class _CaptureRpc:
    """The calls that the engine makes on every rank by `collective_rpc`."""

    _rank_capture: RankCapture | None = None

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        base = type(self.model_runner)  # type: ignore[has-type]
        self.model_runner.__class__ = type(
            "StepCapture" + base.__name__, (StepCaptureRunner, base), {}
        )  # type: ignore[has-type]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then allocate staging, so that vLLM's memory profile counts it."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        settings = self.vllm_config.additional_config.get(CONFIG_KEY)  # type: ignore[attr-defined]
        if settings is None:
            return
        runner = self.model_runner
        model, config = runner.get_model(), self.vllm_config.model_config  # type: ignore[attr-defined]
        group = get_tp_group()
        modules = dict(model.named_modules())
        self._rank_capture = RankCapture(
            settings=CaptureSettings.from_json(settings),
            layers=find_attention_layers(model, layer_kinds(text_config(config))),
            envoy_of=lambda path: envoy_of(runner.nnsight_model, modules[path]),
            watch_projection=partial(watch_projection, modules),
            watch_output=partial(watch_output, modules),
            rank=group.rank_in_group,
            num_ranks=group.world_size,
            total_heads=total_query_heads(config),
            total_kv_heads=config.get_total_num_kv_heads(),
            dtype=config.dtype,
            device=self.device if torch.cuda.is_available() else torch.device("cpu"),  # type: ignore[attr-defined]
            max_step_rows=self.vllm_config.scheduler_config.max_num_batched_tokens,  # type: ignore[attr-defined]
        )
        runner.rank_capture = self._rank_capture

    def capture_facts(self) -> RankFacts:
        return self._capture.facts()

    def capture_open(self, location: StoreLocation) -> None:
        self._capture.open(location)

    def capture_begin_unit(self, layout: UnitLayout) -> None:
        self._capture.begin_unit(layout)

    def capture_seal_unit(self, key: int, final: UnitLayout | None = None) -> None:
        self._capture.seal_unit(key, final)

    def capture_fail_unit(self, key: int, reason: str) -> None:
        self._capture.fail_unit(key, reason)

    def capture_unit_error(self, key: int) -> str | None:
        return self._capture.unit_error(key)

    def capture_poll(self) -> list[RankReport]:
        return self._capture.poll()

    def capture_output_projection(self, layer: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return this rank's rows of a layer's W_O, and its bias if it has one, as bytes."""
        modules = dict(self.model_runner.get_model().named_modules())
        taken = next(one for one in self._capture.taken if one.layer == layer)
        return output_projection(modules, taken), output_bias(modules, taken)

    def capture_timings(self) -> dict[str, float]:
        return dict(self._capture.timings)

    def capture_switch(self, on: bool) -> None:
        """Turn capture off or on again between steps; a benchmark's way to the plain engine."""
        self.model_runner.rank_capture = self._rank_capture if on else None

    @property
    def _capture(self) -> RankCapture:
        if self._rank_capture is None:
            raise RuntimeError("this engine was started without capture settings")
        return self._rank_capture


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    class NNsightCPUModelRunner(NNsightGPUModelRunner, CPUModelRunner):
        """nnsight's runner over vLLM's CPU runner, itself a GPUModelRunner."""

        def _update_states(self, scheduler_output: Any) -> Any:
            deferred = super()._update_states(scheduler_output)
            make_rewindable(self.requests, self.input_batch.generators)
            return deferred

    class NNsightCPUWorker(CPUWorker):
        """vLLM's CPU worker with what `NNsightGPUWorker` adds to the GPU's."""

        collect_nnsight = NNsightGPUWorker.collect_nnsight
        nnsight_request_count = NNsightGPUWorker.nnsight_request_count
        nnsight_register = NNsightGPUWorker.nnsight_register
        nnsight_clear_registered = NNsightGPUWorker.nnsight_clear_registered

        def init_device(self) -> None:
            super().init_device()
            if type(self.model_runner) is not CPUModelRunner:
                raise RuntimeError(
                    f"vLLM built a {type(self.model_runner).__name__}, not its V1 CPU runner; "
                    "unset VLLM_USE_V2_MODEL_RUNNER"
                )
            self.model_runner.__class__ = NNsightCPUModelRunner

    class CaptureWorker(_CaptureRpc, NNsightCPUWorker):
        """A CPU rank."""

else:

    class CaptureWorker(_CaptureRpc, NNsightGPUWorker):  # type: ignore[no-redef]
        """A GPU rank."""
