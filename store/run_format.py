"""The JSON documents of a run, format version 1, as pydantic models. docs/format.md is the spec.

Every document is sealed (`store.sealed_json`). Bytes from a run are untrusted: models forbid
unknown fields, bound every size, and check every name before it can reach a store.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from store import keys
from store.codec import Codec
from store.errors import FormatError
from store.geometry import ArrayGeometry
from store.sealed_json import checksum_of, seal, unseal
from store.shard_index import raw_chunk_sizes, unpack_chunk_sizes

FORMAT_VERSION: Final = 1

Count = Annotated[int, Field(ge=0, le=1 << 48)]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
Name = Annotated[str, Field(max_length=keys.MAX_NAME, pattern=rf"^{keys.NAME_PATTERN}$")]


class Site(StrEnum):
    """A tensor that a run can hold. `rot_q`, `rot_k`: after QK-norm and RoPE; `z`: before W_O.

    `proj_in` is W_O's input, which is not z where the model gates its attention.
    """

    ROT_Q = "rot_q"
    ROT_K = "rot_k"
    V = "v"
    Z = "z"
    PATTERN = "pattern"
    PRE_Q = "pre_q"
    PRE_K = "pre_k"
    PROJ_IN = "proj_in"

    @property
    def is_kv(self) -> bool:
        """Whether the site's heads are key-value heads."""
        return self in (Site.ROT_K, Site.V, Site.PRE_K)

    @property
    def is_of_v(self) -> bool:
        """Whether the site's heads have the size of v's, which may differ from q's and k's."""
        return self in (Site.V, Site.Z, Site.PROJ_IN)

    @property
    def head_dim_name(self) -> str:
        """The Zarr dimension name of the head axis; q and kv heads must differ for xarray."""
        return "kv_head" if self.is_kv else "head"


class Document(BaseModel):
    """Base of all sealed documents."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """Return the sealed canonical JSON of this document."""
        return seal(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Self:
        """Read a sealed document. Raises `DamagedObject` or `FormatError`, naming the object."""
        body = unseal(data, name)
        version = body.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise FormatError(
                f"{name} is of format version {version}; this attnstore reads up to version "
                f"{FORMAT_VERSION}: install a newer attnstore"
            )
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise FormatError(
                f"{name} does not follow format version {FORMAT_VERSION}: {error}"
            ) from error


class Part(BaseModel):
    """Base of the pieces inside documents."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunManifest(Document):
    """`run.json`: the run's identity and everything frozen, written before any engine starts."""

    kind: Literal["run"] = "run"
    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
    created: str
    frozen: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, str]
    layers_without_attention: dict[str, list[Count]] = {}
    """Kind -> the model's numbers of layers of which nothing is captured, since they have none."""

    @model_validator(mode="after")
    def _lists_are_lists(self) -> Self:
        """Check what a reader takes from the config: it may have been altered and sealed again."""
        capture = self.config.get("capture")
        capture = capture if isinstance(capture, dict) else {}
        for name, kind in (("sites", str), ("layers", int)):
            stated = capture.get(name)
            if stated is None:
                continue
            if not isinstance(stated, (list, tuple)) or not all(
                isinstance(one, kind) for one in stated
            ):
                raise ValueError(f"capture.{name} is {stated!r}, no list of {kind.__name__}")
        return self


class LayerSemantics(Part):
    """What one attention layer computes between q, k, v and z; enough to rebuild its pattern."""

    layer: Count
    module: str
    num_heads: Annotated[int, Field(ge=1)]
    num_kv_heads: Annotated[int, Field(ge=1)]
    head_size: Annotated[int, Field(ge=1)]
    v_head_size: Annotated[int, Field(ge=1)]
    scale: float
    sliding_window: Annotated[int, Field(ge=1)] | None = None
    logit_softcap: float | None = None
    alibi_slopes: list[float] | None = None
    sinks: list[float] | None = None

    @model_validator(mode="after")
    def _one_value_a_head(self) -> Self:
        for name in ("alibi_slopes", "sinks"):
            values = getattr(self, name)
            if values is not None and len(values) != self.num_heads:
                raise ValueError(
                    f"layer {self.layer} has {len(values)} {name} for {self.num_heads} heads"
                )
        return self


class ModelManifest(Document):
    """`model.json`: geometry and attention semantics, from the first engine."""

    kind: Literal["model"] = "model"
    run_id: str
    architecture: str
    dtype: Literal["bfloat16", "float16", "float32"]
    hidden_size: Annotated[int, Field(ge=1)]
    layers: list[LayerSemantics]
    versions: dict[str, str] = {}

    @property
    def fingerprint(self) -> str:
        """The crc32c of what the model computes, whichever run and library versions it is from."""
        described = {"architecture", "dtype", "hidden_size", "layers"}
        return checksum_of(self.model_dump(mode="json", include=described, exclude_none=True))


class PlanFile(Part):
    """One Parquet file of a plan segment."""

    name: Name
    bytes: Count
    crc32c: Hex32
    rows: Count


class PlanInput(Part):
    """A source file that a plan segment was made from; `stamp` is the back end's version."""

    url: str
    bytes: Count
    sha256: str
    stamp: str = ""


class PlanManifest(Document):
    """`plan/<segment>/manifest.json`: the segment's files and sums; written last."""

    kind: Literal["plan"] = "plan"
    run_id: str
    segment: Count
    first_prompt: Count
    num_prompts: Count
    num_tokens: Count
    first_unit: Count
    num_units: Count
    plan_hash: str
    inputs: list[PlanInput] = []
    prompts: list[PlanFile]
    units: list[PlanFile]


class SnapshotManifest(Document):
    """`snapshots/<name>/manifest.json`: consolidated commits; derived, written last."""

    kind: Literal["snapshot"] = "snapshot"
    run_id: str
    name: Name
    created: str
    units: Count
    complete_folders: Count
    """Commit folders 0 up to this number hold a commit of every unit."""
    files: list[PlanFile]


class ObjectRecord(Part):
    """One object of an attempt; `name` is relative to the attempt's folder.

    `crc32c` is that of the object's bytes; for a shard it is `store.shard.shard_checksum`.
    """

    name: Name
    bytes: Count
    crc32c: Hex32


class ArrayRecord(Part):
    """One site's array in one unit. `heads` and `layers` are the model's numbers by array index."""

    site: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}$")]
    dtype: Literal["bfloat16", "float16", "float32", "uint8"]
    dims: list[str]
    layers: list[Count]
    heads: list[Count]
    num_tokens: Count
    head_size: Annotated[int, Field(ge=1, le=1 << 20)]
    shard_tokens: Annotated[int, Field(ge=1, le=1 << 30)]
    shard_heads: Annotated[int, Field(ge=1, le=1 << 20)]
    chunk_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    group_heads: Annotated[int, Field(ge=1, le=1 << 20)]
    codec: Codec
    tags: bool = False
    """Whether a tag follows every chunk (`store.shard`); the first runs of version 1 have none."""
    chunk_sizes: dict[str, str] = {}
    """Shard name -> base64 of the little-endian uint32 stored sizes of its chunks in physical
    order; empty for `raw`, whose sizes are implied."""

    @classmethod
    def of(
        cls,
        geometry: ArrayGeometry,
        *,
        site: str,
        dtype: str,
        dims: list[str],
        layers: list[int],
        heads: list[int],
        codec: Codec,
        chunk_sizes: dict[str, str] | None = None,
    ) -> Self:
        """Return the record of an array that is cut like this."""
        return cls(
            site=site,
            dtype=dtype,
            dims=dims,
            layers=layers,
            heads=heads,
            num_tokens=geometry.num_tokens,
            head_size=geometry.head_size,
            shard_tokens=geometry.shard_tokens,
            shard_heads=geometry.shard_heads,
            chunk_tokens=geometry.chunk_tokens,
            group_heads=geometry.group_heads,
            codec=codec,
            tags=geometry.tags,
            chunk_sizes=chunk_sizes or {},
        )

    @property
    def is_packed(self) -> bool:
        """Whether this is a packed pattern [layer, head, entry]; `num_tokens` counts entries."""
        return self.dims[-1:] == ["entry"]

    def shard_name(self, layer_index: int, token_shard: int, head_shard: int) -> str:
        """Return the name, inside the attempt, of the shard at these places of the cut."""
        if self.is_packed:
            return keys.shard_key(self.site, (layer_index, head_shard, token_shard))
        return keys.shard_key(self.site, (layer_index, token_shard, head_shard, 0))

    @property
    def item_bytes(self) -> int:
        return {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}[self.dtype]

    def geometry(self) -> ArrayGeometry:
        """Return the array's cut; raises `FormatError` where the numbers do not fit together."""
        try:
            return ArrayGeometry(
                num_layers=len(self.layers),
                num_tokens=self.num_tokens,
                num_heads=len(self.heads),
                head_size=self.head_size,
                item_bytes=self.item_bytes,
                shard_tokens=self.shard_tokens,
                shard_heads=self.shard_heads,
                chunk_tokens=self.chunk_tokens,
                group_heads=self.group_heads,
                tags=self.tags,
            )
        except ValueError as error:
            raise FormatError(f"array {self.site}: {error}") from error

    def stored_sizes(
        self, geometry: ArrayGeometry, token_shard: int, name: str
    ) -> NDArray[np.uint32]:
        """Return the stored sizes of a shard's chunks, crc32c included, in physical order.

        `geometry` is this record's. Raises `FormatError` where the record lacks them.
        """
        if self.codec is Codec.RAW:
            return raw_chunk_sizes(geometry, token_shard)
        text = self.chunk_sizes.get(name)
        if text is None:
            raise FormatError(f"the commit gives no chunk sizes for {name}; run `attnstore verify`")
        return unpack_chunk_sizes(text, geometry, token_shard, name)


class Outcome(StrEnum):
    """What became of a prompt."""

    STORED = "stored"
    FAILED = "failed"
    SKIPPED = "skipped"


class PromptOutcomes(Part):
    """Each prompt of a unit in plan order, as columns of equal length.

    `first_row` and `num_rows` place a stored prompt on the token axis; row i of the prompt is
    position `first_position + i`. Rows are back to back.
    """

    outcome: list[Outcome]
    first_row: list[Count]
    num_rows: list[Count]
    first_position: list[Count]
    reasons: dict[str, str] = {}
    """Place of the prompt in the unit (decimal) -> why it failed or was skipped."""


class RankRecord(Part):
    """What one rank wrote: its global heads per site and its share of objects."""

    rank: Count
    heads: dict[str, list[Count]]
    objects: Count
    bytes: Count


class Commit(Document):
    """The create-only document that makes one attempt's data part of the run."""

    kind: Literal["commit"] = "commit"
    run_id: str
    unit: Count
    attempt: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}$")]
    repair: Count = 0
    first_prompt: Count
    model_crc32c: Hex32 | None = None
    """The fingerprint of model.json; the first runs of version 1 have none."""
    plan_hash: Annotated[str, Field(max_length=128)] | None = None
    """That of the segment whose prompts were captured; the first runs of version 1 have none."""
    prompts: PromptOutcomes
    arrays: list[ArrayRecord]
    objects: list[ObjectRecord]
    ranks: list[RankRecord]
    timings: dict[str, float] = {}
