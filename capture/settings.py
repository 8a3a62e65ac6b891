"""What an engine and its capture are told, and tell back: plain values, no torch, no vLLM.

`jobs` builds these from the run's config and ships them to a worker; `capture.engine` obeys them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from capture.rows import ALL_POSITIONS, Positions
from store.codec import Codec
from store.run_format import ModelManifest, Site


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How to start vLLM. `options` goes to vLLM as it is, after the settings that capture needs."""

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.85
    cpu_kv_cache_gib: float = 1.0
    load_format: str = "auto"
    trust_remote_code: bool = False
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generation:
    """How to continue prompts. `temperature` 0 takes the likeliest token each time."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    seed: int = 0
    """Each prompt draws by this seed and its number in the plan, whatever it is batched with."""
    ignore_eos: bool = False

    def at_most(self, max_tokens: int | None) -> Generation:
        """Return the same with no more tokens than `max_tokens`; None: as many."""
        if max_tokens is None or max_tokens >= self.max_tokens:
            return self
        return replace(self, max_tokens=max_tokens)


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """What to keep and with how much memory. `layers` None means every attention layer."""

    sites: tuple[Site, ...] = (Site.ROT_Q, Site.ROT_K, Site.V, Site.Z)
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    """Query heads to keep, rounded up by `capture.heads`; None means all."""
    positions: Positions = ALL_POSITIONS
    codec: Codec = Codec.RAW
    pattern: str | None = None
    """The dtype of stored patterns; None: they are rebuilt when read."""
    generation: Generation | None = None
    """None: prompts are read, not continued."""
    probe: str | None = None
    """`package.module:function` of the user, run on each rank (`capture.probe`)."""
    probe_source: str | None = None
    """Fingerprint of its source that every rank must find (`capture.probe_source`)."""
    output_weights: bool = False
    """Store each layer's W_O with the run, once, so that a reader can tell contributions."""
    host_bytes: int = 1 << 30
    """Host staging of each rank, allocated once: slabs of `slot_bytes`."""
    buffer_bytes: int = 32 << 30
    """A unit is begun while the rows of all begun units fit in so much; one always is. It bounds
    what shards that fill over several steps may take beside the slabs, on each rank."""
    device_bytes: int = 1 << 30
    """Device ring of each rank, allocated once before vLLM profiles its memory (CUDA only)."""
    slot_bytes: int = 64 << 20
    writer_threads: int = 2
    """Shard writers of each rank."""
    writer_processes: bool | None = None
    """Whether each is a process instead of a thread; None: beside a GPU, not on a CPU."""
    stall_seconds: float = 240.0
    """How long a rank may wait for free slabs before a step; beyond it the engine fails."""

    @property
    def open_ended(self) -> bool:
        """Whether a prompt may end before its last token, so that its rows are known only then."""
        return self.generation is not None and not self.generation.ignore_eos

    def to_json(self) -> dict[str, Any]:
        """Return plain values that survive vLLM's own config."""
        return {
            **asdict(self),
            "sites": [site.value for site in self.sites],
            "layers": None if self.layers is None else list(self.layers),
            "heads": None if self.heads is None else list(self.heads),
            "codec": self.codec.value,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> CaptureSettings:
        """Undo `to_json`."""
        layers, heads = values["layers"], values["heads"]
        generation = values["generation"]
        return cls(
            **{
                **values,
                "sites": tuple(Site(site) for site in values["sites"]),
                "layers": None if layers is None else tuple(layers),
                "heads": None if heads is None else tuple(heads),
                "codec": Codec(values["codec"]),
                "positions": Positions(**values["positions"]),
                "generation": None if generation is None else Generation(**generation),
            }
        )


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """Where a run lives. Options may hold credentials: they travel, but are never stored."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptTask:
    """One prompt of a unit. `reason` says why it must not run (it then counts as failed)."""

    token_ids: np.ndarray
    """int32 [num_tokens]"""
    reason: str | None = None
    skipped: bool = False
    """With a reason: it counts as skipped, not as failed."""


@dataclass(frozen=True, slots=True)
class UnitTask:
    """One attempt at one unit. `first_prompt` is the plan-wide number of its first prompt."""

    unit: int
    attempt: str
    first_prompt: int
    prompts: tuple[PromptTask, ...]
    repair: int = 0
    batch_prompts: int = 0
    """0: all prompts at once. N > 0: in order, N in the engine at a time, the next N only after
    those; how a bad prompt is found, with `CaptureEngine.prompts_finished(unit)` as its witness."""
    max_tokens: int | None = None
    """At most so many tokens after each prompt, where the settings say more; for trials."""
    plan_hash: str | None = None
    """That of the plan segment which the prompts were read from."""


class UnitStatus(StrEnum):
    """How an attempt ended."""

    COMMITTED = "committed"
    SUPERSEDED = "superseded"
    """Another attempt had committed the unit before; the run is complete without this one."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What a worker reports of one attempt."""

    unit: int
    attempt: str
    status: UnitStatus
    error: str | None = None
    rank: int | None = None
    """The rank that the error comes from, where it is one rank's."""
    store_failed: bool = False
    """Whether it was the store that failed, not the unit: its error's type, where it was raised."""
    stored: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the started engine says of itself."""

    model: ModelManifest
    bytes_per_token: int
    """Captured bytes per row over all ranks, raw."""
