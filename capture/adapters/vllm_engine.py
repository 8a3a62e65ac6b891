"""Start nnsight's vLLM engine with our worker in it, and drive its steps.

The engine core runs in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), so whoever owns the
engine owns the step loop: it can make room before a step instead of stalling inside one. Ranks
beyond one are vLLM's own worker processes. Private parts used: `VLLM._WORKER_CLS`, the LLM's
`llm_engine` with `add_request` and `step`, vLLM's environment variables.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capture.adapters.contract import check_contract
from capture.adapters.meta_kernels import register_meta_kernels
from capture.adapters.vllm_runner import EXTRA_ARG
from capture.errors import PromptRefused
from capture.layer_kinds import layer_kinds, refuse_layers, text_part
from capture.refusals import refuse_model, refuse_options
from capture.settings import CaptureSettings, EngineSettings, Generation
from capture.token_text import token_string

WORKER_CLASS = "capture.adapters.vllm_worker.CaptureWorker"


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is over. `error` says why where it did not run to its end."""

    unit: int
    prompt: int
    error: str | None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    reason: str = ""


class StepEngine:
    """One vLLM engine: requests in, steps, finished requests out, calls to every rank."""

    def __init__(self, model: Any, generation: Generation | None = None) -> None:
        self.nnsight_model, self._generation = model, generation
        self._engine = model.vllm_entrypoint.llm_engine
        self._owner: dict[str, tuple[int, int]] = {}
        executor = self._engine.model_executor
        # Kept here: vLLM drops its own handles when it shuts a broken executor down.
        self._ranks = [(one.rank, one.proc) for one in getattr(executor, "workers", None) or ()]

    @property
    def lost_rank(self) -> int | None:
        """The rank whose process ended by itself; None where none did, or ranks have none.

        vLLM ends the others by SIGTERM then, which is how they are told from it; and one that fails
        for want of the other ends with a code above 0, so the lowest code is the first cause.
        """
        codes = {rank: proc.exitcode for rank, proc in self._ranks}
        own = {r: code for r, code in codes.items() if code not in (None, 0, -signal.SIGTERM)}
        return min(own, key=own.__getitem__, default=None)

    @property
    def vllm_config(self) -> Any:
        return self._engine.vllm_config

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._engine.has_unfinished_requests())

    def add(
        self,
        unit: int,
        prompt: int,
        token_ids: np.ndarray,
        number: int = 0,
        max_tokens: int | None = None,
    ) -> None:
        """Queue a prompt, to be read or continued. Raises `PromptRefused` where vLLM refuses it.

        `number` is its number in the plan, by which it draws its own random tokens; it gets no more
        than `max_tokens` of them.
        """
        from vllm import SamplingParams, exceptions

        generation = self._generation and self._generation.at_most(max_tokens)
        params = SamplingParams(
            detokenize=False,
            extra_args={EXTRA_ARG: [unit, prompt]},
            **_sampling(generation, number),
        )
        request_id = f"u{unit}p{prompt}"
        # vLLM lets ids pass that lie in the padding of its embedding table.
        vocabulary = self.vllm_config.model_config.get_vocab_size()
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocabulary:
            raise PromptRefused(
                f"token ids from {token_ids.min()} to {token_ids.max()} do not all lie in the "
                f"model's vocabulary of {vocabulary}"
            )
        prompt_ids = {"prompt_token_ids": [int(token) for token in token_ids]}
        try:
            self._engine.add_request(request_id, prompt_ids, params)
        except (ValueError, getattr(exceptions, "VLLMError", ValueError)) as error:
            raise PromptRefused(f"vLLM refused the prompt: {error}") from error
        self._owner[request_id] = (unit, prompt)

    def abort(self, unit: int) -> None:
        """Take back every unfinished request of a unit."""
        ids = [request_id for request_id, owner in self._owner.items() if owner[0] == unit]
        if ids:
            self._engine.abort_request(ids)
        for request_id in ids:
            self._owner.pop(request_id, None)

    def step(self) -> list[Finished]:
        """Run one step; return the requests that ended in it."""
        from vllm.v1.engine.llm_engine import LLMEngine

        finished: list[Finished] = []
        # nnsight's own `step` collects saved values from every rank; the step block saves none.
        for output in LLMEngine.step(self._engine):
            if not output.finished:
                continue
            owner = self._owner.pop(output.request_id, None)
            if owner is None:
                continue
            finished.append(self._finished(owner, output))
        return finished

    def _finished(self, owner: tuple[int, int], output: Any) -> Finished:
        reason = output.outputs[0].finish_reason if output.outputs else "no output"
        if reason not in ("length", "stop"):
            return Finished(*owner, f"vLLM ended the request: {reason}")
        if self._generation is None:
            return Finished(*owner, None)
        said = output.outputs[0]
        ids = tuple(int(token) for token in said.token_ids)
        logprobs = tuple(
            float(candidates[token].logprob)
            for token, candidates in zip(ids, said.logprobs, strict=True)
        )
        return Finished(*owner, None, ids, logprobs, reason)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as a reader may see it: its own text, or its name."""
        tokenizer = self._engine.get_tokenizer()
        return [token_string(tokenizer, token) for token in token_ids]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a worker method on every rank; results in rank order."""
        return list(self._engine.collective_rpc(method, args=args))

    def shutdown(self) -> None:
        """End the engine and its worker processes."""
        self._engine.engine_core.shutdown()


def _sampling(generation: Generation | None, number: int) -> dict[str, Any]:
    if generation is None:
        return {"temperature": 0.0, "max_tokens": 1}
    return {
        "max_tokens": generation.max_tokens,
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "top_k": generation.top_k,
        "seed": (generation.seed * 1_000_003 + number) % (1 << 63),
        "ignore_eos": generation.ignore_eos,
        "logprobs": 0,
    }


def start_engine(settings: EngineSettings, capture: CaptureSettings | None) -> StepEngine:
    """Start an engine; `capture` None starts a plain one, for comparison."""
    refuse_options(settings)
    set_environment(settings)
    config = model_config(settings)
    refuse_model(config, settings.model)
    if capture is not None:
        refuse_layers(layer_kinds(text_part(config)), capture.layers, settings.model)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

        _set_torch_accelerator_to_noop()
        register_meta_kernels()
    from nnsight.modeling.vllm import VLLM

    check_contract()
    _zero_new_blocks()
    VLLM._WORKER_CLS = WORKER_CLASS
    # Modules stay: each of ten collections while vLLM starts takes 0.4 s to look through them.
    gc.freeze()
    model = VLLM(settings.model, dispatch=True, **engine_arguments(settings, capture))
    return StepEngine(model, None if capture is None else capture.generation)


def _zero_new_blocks() -> None:
    """Let vLLM zero every block of KV cache that it gives to a request, as for mixed models.

    The CPU's attention kernel multiplies what lies behind a prompt's last row by a probability of
    0, so a NaN that another prompt left there would come out in its rows. GPU kernels mask it.
    """
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import KVCacheConfig

    if current_platform.is_cpu():
        KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)


def model_config(settings: EngineSettings) -> dict[str, Any]:
    """Return the model's own config as plain values."""
    from transformers import PretrainedConfig

    found, _ = PretrainedConfig.get_config_dict(settings.model, revision=settings.revision)
    return dict(found)


def engine_arguments(settings: EngineSettings, capture: CaptureSettings | None) -> dict[str, Any]:
    """Return vLLM's arguments for these settings."""
    arguments: dict[str, Any] = {
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "load_format": settings.load_format,
        "trust_remote_code": settings.trust_remote_code,
        "seed": settings.seed,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_log_stats": True,
    }
    if settings.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    for name in ("revision", "tokenizer", "max_model_len"):
        if (value := getattr(settings, name)) is not None:
            arguments[name] = value
    if _on_cuda():
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    arguments.update(settings.options)
    if capture is not None:
        extra = dict(arguments.get("additional_config") or {})
        arguments["additional_config"] = {**extra, EXTRA_ARG: capture.to_json()}
    return arguments


def set_environment(settings: EngineSettings) -> None:
    """Set the environment that vLLM and its worker processes read; call before importing vLLM."""
    forced = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if not _on_cuda():
        forced["VLLM_CPU_KVCACHE_SPACE"] = f"{settings.cpu_kv_cache_gib:g}"
        defaults.update(cpu_threads(settings.tensor_parallel_size, _cpus()))
    os.environ.update(forced)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def cpu_threads(ranks: int, cpus: Sequence[int]) -> dict[str, str]:
    """Return vLLM's CPU thread settings: whole cores for each rank where there are enough."""
    if ranks == 1:
        return {}
    share = len(cpus) // ranks
    if share == 0:
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    binds = (
        ",".join(str(cpu) for cpu in cpus[rank * share : (rank + 1) * share])
        for rank in range(ranks)
    )
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(binds)}


def _cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _on_cuda() -> bool:
    import torch

    return bool(torch.version.cuda) and torch.cuda.is_available()
