"""The run's config: YAML and `--set key=value` into one validated, immutable `RunConfig`.

Knows every key a user may write and which of them are *frozen*: those that the stored data depends
on are marked `FROZEN` beside the field, and a resume that changes one is refused. Everything else
(parallelism, memory, deadlines, credentials) may differ each time a run is run. Knows nothing of
Ray, of engines or of how a plan is made. Paths are relative to the working directory.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from capture.rows import ALL_POSITIONS, Positions
from capture.settings import CaptureSettings, EngineSettings, Generation, StoreLocation
from store.codec import Codec
from store.planned_units import positions_slice
from store.run_format import Site


class Frozen:
    """Marks a field that the stored data depends on; a resume with another value is refused."""


FROZEN: Final = Frozen()

_SECRET = re.compile(r"(token|secret|password|api_key|access_key)$", re.IGNORECASE)
"""Engine options of such names (`hf_token`) are not stored."""

Bytes = Annotated[int, Field(ge=1 << 20)]


class Section(BaseModel):
    """Base of the config's parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceFormat(StrEnum):
    """How a prompt source is read; `auto` goes by the file name."""

    AUTO = "auto"
    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    TEXT = "text"
    HF_DATASET = "hf_dataset"


class SpecialTokens(StrEnum):
    """Whether the tokenizer adds what it was trained with (BOS and so on)."""

    MODEL = "model"
    """As the tokenizer does by itself."""
    NONE = "none"
    """Nothing is added; the text is the whole sequence."""


class TooLong(StrEnum):
    """What becomes of a prompt longer than the model takes."""

    FAIL = "fail"
    TRUNCATE = "truncate"
    """Keep its first tokens; its metadata says how many it had."""


class PromptsConfig(Section):
    """Where prompts come from and how they become token ids."""

    source: Annotated[str, Field(min_length=1)]
    """A path or any fsspec URL; globs allowed, e.g. `s3://bucket/corpus/*.jsonl.gz`."""
    format: SourceFormat = SourceFormat.AUTO
    id_column: Annotated[str | None, FROZEN] = "id"
    """Ids are derived from the prompt's place where the column is absent or this is null."""
    text_column: Annotated[str, FROZEN] = "text"
    token_ids_column: Annotated[str | None, FROZEN] = None
    messages_column: Annotated[str | None, FROZEN] = None
    """Chat messages, put through the tokenizer's chat template."""
    add_generation_prompt: Annotated[bool, FROZEN] = False
    """Whether a chat ends with the opening of the assistant's turn."""
    special_tokens: Annotated[SpecialTokens, FROZEN] = SpecialTokens.MODEL
    too_long: Annotated[TooLong, FROZEN] = TooLong.FAIL
    limit: Annotated[int | None, Field(ge=1), FROZEN] = None
    """Take only the first so many prompts."""
    skip: Annotated[tuple[str, ...], FROZEN] = ()
    """Prompt ids to leave out; they are recorded as skipped."""
    options: dict[str, Any] = {}
    """fsspec options of the source (credentials, endpoint); never stored."""

    @model_validator(mode="after")
    def _one_content(self) -> PromptsConfig:
        if self.token_ids_column is not None and self.messages_column is not None:
            raise ValueError("set token_ids_column or messages_column, not both")
        return self


class ModelConfig(Section):
    """Which model, exactly."""

    path: Annotated[str, Field(min_length=1), FROZEN]
    """A local folder or a hub name."""
    revision: Annotated[str | None, FROZEN] = None
    tokenizer: Annotated[str | None, FROZEN] = None
    dtype: Annotated[str, Field(pattern="^(bfloat16|float16|float32)$"), FROZEN] = "bfloat16"
    max_model_len: Annotated[int | None, Field(ge=2), FROZEN] = None
    trust_remote_code: bool = False
    load_format: Annotated[str, FROZEN] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class PatternMode(StrEnum):
    """How attention patterns come to a reader."""

    DERIVED = "derived"
    """Rebuilt from the stored rot_q and rot_k when read."""

    STORED = "stored"
    """Made on the ranks and stored, packed; they outweigh q and k from some hundred tokens on."""


class CaptureConfig(Section):
    """What is kept of every prompt."""

    sites: Annotated[tuple[Site, ...], Field(min_length=1), FROZEN] = (
        Site.ROT_Q,
        Site.ROT_K,
        Site.V,
        Site.Z,
    )
    layers: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...] | None, Field(min_length=1), FROZEN
    ] = None
    """The model's layer numbers; null means every attention layer."""
    heads: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...] | None, Field(min_length=1), FROZEN
    ] = None
    """Query heads, by global number; null means all. Rounded up to whole groups that share a KV
    head, equally many on every rank; rot_k and v keep the KV heads that they read."""
    positions: Annotated[str, FROZEN] = "all"
    """`all`, `last`, or a slice such as `0:16` or `-8:`; a pattern needs them all."""
    codec: Annotated[Codec, FROZEN] = Codec.RAW
    pattern: Annotated[PatternMode, FROZEN] = PatternMode.DERIVED
    pattern_dtype: Annotated[str, Field(pattern="^(float16|bfloat16|float32|uint8)$"), FROZEN] = (
        "float16"
    )
    """How stored patterns are kept; uint8 is round(255 p)."""
    unit_tokens: Annotated[int | None, Field(ge=1), FROZEN] = None
    """Units hold about so many tokens: the grain of work, retry and resume. Null: `jobs.unit_size`
    chooses it when the run is created."""
    unit_bytes: Annotated[int | None, Field(ge=1), FROZEN] = None
    """Units take at most so many bytes of each rank's buffers. Null: `jobs.unit_size` chooses it
    with `unit_tokens`, where tokens alone do not tell."""
    probe: Annotated[str | None, Field(pattern=r"^[\w.]+:\w+$"), FROZEN] = None
    """A function of yours, importable on the workers, whose tensors become sites."""
    output_weights: bool = False
    """Store W_O of every captured layer once, for `run.contribution`."""

    @field_validator("positions", mode="before")
    @classmethod
    def _open_slice(cls, value: Any) -> Any:
        """YAML reads `-8:` without quotes as a mapping of -8 to nothing."""
        if isinstance(value, dict) and len(value) == 1:
            ((start, stop),) = value.items()
            if isinstance(start, int) and stop is None:
                return f"{start}:"
        return value

    @model_validator(mode="after")
    def _distinct(self) -> CaptureConfig:
        if len(set(self.sites)) != len(self.sites):
            raise ValueError(f"sites are listed twice: {', '.join(self.sites)}")
        if Site.PATTERN in self.sites:
            raise ValueError(
                "pattern is rebuilt when read; take it out of capture.sites, or set "
                "capture.pattern to stored"
            )
        missing = [site.value for site in (Site.ROT_Q, Site.ROT_K) if site not in self.sites]
        if self.pattern is PatternMode.STORED and missing:
            raise ValueError(
                f"pattern is stored, and it is made of rot_q and rot_k: add {', '.join(missing)} "
                "to sites"
            )
        if self.layers is not None and len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers are listed twice: {list(self.layers)}")
        if self.heads is not None and len(set(self.heads)) != len(self.heads):
            raise ValueError(f"heads are listed twice: {list(self.heads)}")
        whole = self.kept_positions() == ALL_POSITIONS
        if not whole and {Site.ROT_Q, Site.ROT_K} <= set(self.sites):
            raise ValueError(
                f"positions is {self.positions!r}, but patterns are rebuilt from rot_q and every "
                "position of rot_k: keep all positions, or leave rot_q or rot_k out of sites"
            )
        return self

    def kept_positions(self) -> Positions:
        """Return `positions` as the engine takes it. Raises ValueError where it is no slice."""
        kept = positions_slice(self.positions)
        if kept is None:
            raise ValueError(
                f"positions is {self.positions!r}; write all, last, or a slice such as 0:16 or -8:"
            )
        return Positions(kept.start, kept.stop)


class GenerateConfig(Section):
    """How prompts are continued; `generate: 8` is short for `generate: {tokens: 8}`."""

    tokens: Annotated[int, Field(ge=0), FROZEN] = 0
    """The most tokens after each prompt; 0 reads prompts without continuing them."""
    temperature: Annotated[float, Field(ge=0, le=2), FROZEN] = 0.0
    """0 takes the likeliest token each time; vLLM allows up to 2."""
    top_p: Annotated[float, Field(gt=0, le=1), FROZEN] = 1.0
    top_k: Annotated[int, Field(ge=0), FROZEN] = 0
    """0: all tokens."""
    seed: Annotated[int, Field(ge=0), FROZEN] = 0
    """Each prompt draws by this seed and its number in the plan."""
    ignore_eos: Annotated[bool, FROZEN] = False

    @model_validator(mode="before")
    @classmethod
    def _tokens_alone(cls, value: Any) -> Any:
        alone = isinstance(value, int) and not isinstance(value, bool)
        return {"tokens": value} if alone else value

    def generation(self) -> Generation | None:
        """Return what the engine needs to know; None where nothing is generated."""
        if not self.tokens:
            return None
        return Generation(
            max_tokens=self.tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )


class EngineConfig(Section):
    """How the engine runs."""

    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 8192
    max_num_seqs: Annotated[int, Field(ge=1)] = 256
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    cpu_kv_cache_gib: Annotated[int, Field(ge=1)] = 1
    """vLLM takes whole GiB here; only on CPUs."""
    host_bytes: Bytes = 1 << 30
    buffer_bytes: Bytes = 32 << 30
    """A unit begins while the rows of all begun units fit in so much, on each rank; one always."""
    device_bytes: Bytes = 1 << 30
    slot_bytes: Bytes = 64 << 20
    writer_threads: Annotated[int, Field(ge=1)] = 2
    writer_processes: bool | None = None
    """Whether each writer is a process instead of a thread; null: beside a GPU, not on a CPU."""
    units_in_flight: Annotated[int, Field(ge=1, le=8)] = 2
    """Units inside one engine at a time: while one ends, the next already fills its steps."""
    seed: Annotated[int, FROZEN] = 0
    options: Annotated[dict[str, Any], FROZEN] = {}
    """Passed to vLLM as they are. Frozen, since some of them change what the model computes."""


class WorkersConfig(Section):
    """How many workers, where, and how long they may take."""

    count: Annotated[int, Field(ge=1)] = 1
    min: Annotated[int | None, Field(ge=1)] = None
    max: Annotated[int | None, Field(ge=1)] = None
    """Elastic between `min` and `max`: all are asked for, the run goes on with those there are."""
    address: str | None = None
    """An existing Ray cluster (`auto`, `host:6379`); null starts Ray on this machine."""
    num_cpus: Annotated[float | None, Field(ge=0)] = None
    num_gpus: Annotated[float | None, Field(ge=0)] = None
    """Per worker; null asks for tensor_parallel_size GPUs where the cluster has any, else CPUs."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Failures of a unit before it is run prompt by prompt to find the bad one."""
    unit_deadline_seconds: Annotated[float, Field(gt=0)] = 1800.0
    start_deadline_seconds: Annotated[float, Field(gt=0)] = 1800.0
    store_patience_seconds: Annotated[float, Field(gt=0)] = 900.0
    """How long the store may fail before the run gives up with exit code 75."""
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0
    """After SIGTERM: how long units in flight may still finish."""
    duplicate_stragglers: bool = False
    """At the end, give units still running to idle workers too; the first commit wins."""

    @model_validator(mode="after")
    def _ordered(self) -> WorkersConfig:
        if self.lowest > self.highest:
            raise ValueError(f"workers.min ({self.lowest}) exceeds workers.max ({self.highest})")
        return self

    @property
    def lowest(self) -> int:
        """Return how few workers the run may go on with."""
        return self.min if self.min is not None else min(1, self.highest)

    @property
    def highest(self) -> int:
        """Return how many workers are asked for."""
        return self.max if self.max is not None else max(self.count, self.min or 1)


class RunConfig(Section):
    """One run, whole: what to capture, from what, where to, and how to go about it."""

    output: Annotated[str, Field(min_length=1)]
    prompts: PromptsConfig
    model: ModelConfig
    capture: CaptureConfig = CaptureConfig()
    generate: GenerateConfig = GenerateConfig()
    engine: EngineConfig = EngineConfig()
    workers: WorkersConfig = WorkersConfig()
    self_check: bool = True
    """Try the engine on a few prompts, alone and batched, before the run starts."""
    max_bytes: Annotated[int | None, Field(ge=1)] = None
    """Quota: the run does not start, or stops cleanly, rather than store more than this."""
    storage_options: dict[str, Any] = {}
    """Options of the output's object store; they may hold credentials and are never stored."""

    @model_validator(mode="after")
    def _whole_where_generated(self) -> RunConfig:
        if self.generate.tokens and self.capture.kept_positions() != ALL_POSITIONS:
            raise ValueError(
                f"generate.tokens is {self.generate.tokens} and capture.positions is "
                f"{self.capture.positions!r}: how long a continued prompt gets is not known "
                "before; keep all positions"
            )
        return self

    def stored(self) -> dict[str, Any]:
        """Return the config as `run.json` keeps it: everything but credentials."""
        body = self.model_dump(mode="json", exclude={"storage_options": True})
        body["prompts"].pop("options")
        body["output"] = public_url(self.output)
        body["prompts"]["source"] = public_url(self.prompts.source)
        body["engine"]["options"] = self._public_options()
        return body

    def frozen_fields(self) -> dict[str, Any]:
        """Return dotted name -> value of every field that a resume may not change."""
        found = {**_frozen_fields(self, ""), "engine.options": self._public_options()}
        if self.capture.heads is not None:
            # Which heads fill up the ranks follows from how many ranks there are.
            found["engine.tensor_parallel_size"] = self.engine.tensor_parallel_size
        return found

    def _public_options(self) -> dict[str, Any]:
        return {k: v for k, v in self.engine.options.items() if not _SECRET.search(k)}

    def engine_settings(self) -> EngineSettings:
        """Return what `capture.engine` needs to start vLLM."""
        engine, model = self.engine, self.model
        return EngineSettings(
            model=_local(model.path),
            revision=model.revision,
            tokenizer=None if model.tokenizer is None else _local(model.tokenizer),
            dtype=model.dtype,
            tensor_parallel_size=engine.tensor_parallel_size,
            max_model_len=model.max_model_len,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            cpu_kv_cache_gib=engine.cpu_kv_cache_gib,
            load_format=model.load_format,
            trust_remote_code=model.trust_remote_code,
            seed=engine.seed,
            options=dict(engine.options),
        )

    def capture_settings(self) -> CaptureSettings:
        """Return what `capture.engine` needs to know of what to keep."""
        return CaptureSettings(
            sites=self.capture.sites,
            layers=self.capture.layers,
            heads=self.capture.heads,
            codec=self.capture.codec,
            pattern=(
                self.capture.pattern_dtype if self.capture.pattern is PatternMode.STORED else None
            ),
            positions=self.capture.kept_positions(),
            probe=self.capture.probe,
            output_weights=self.capture.output_weights,
            generation=self.generate.generation(),
            host_bytes=self.engine.host_bytes,
            buffer_bytes=self.engine.buffer_bytes,
            device_bytes=self.engine.device_bytes,
            slot_bytes=self.engine.slot_bytes,
            writer_threads=self.engine.writer_threads,
            writer_processes=self.engine.writer_processes,
        )

    def location(self) -> StoreLocation:
        """Return where the run lives; local paths absolute, since workers start elsewhere."""
        url = self.output if "://" in self.output else str(Path(self.output).absolute())
        return StoreLocation(url=url, options=dict(self.storage_options))


def public_url(url: str) -> str:
    """Return a URL without what may be secret in it: user, password, query (signed URLs)."""
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if scheme in ("http", "https"):
        path = path.partition("?")[0]
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _local(name: str) -> str:
    """A folder's absolute path, since workers start elsewhere; a hub name stays as it is."""
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def _frozen_fields(section: BaseModel, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    dumped = section.model_dump(mode="json")
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found |= _frozen_fields(value, f"{prefix}{name}.")
        elif any(isinstance(mark, Frozen) for mark in info.metadata):
            found[f"{prefix}{name}"] = dumped[name]
    return found
