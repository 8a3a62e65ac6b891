"""Small runs of known values, written through the real writer.

Legend: L layers, T rows of a unit, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from store import keys
from store.attempt import AttemptWriter
from store.codec import DTYPES, Codec
from store.commit import CommitResult, commit_unit
from store.geometry import ArrayGeometry
from store.objects.protocol import ObjectStore
from store.plan import PROMPT_FIELDS, UNIT_FIELDS, read_manifest, read_segments
from store.plan_writer import write_segment
from store.run_format import (
    ArrayRecord,
    Commit,
    LayerSemantics,
    ModelManifest,
    ObjectRecord,
    Outcome,
    PromptOutcomes,
    RankRecord,
    RunManifest,
)
from store.shard import encode_shard
from store.shard_index import pack_chunk_sizes

RUN_ID = "0123456789abcdef"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SampleShape:
    """The model and the cut of a sample run: small shards, so that every unit has several."""

    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    ranks: int = 1
    dtype: str = "float32"
    codec: Codec = Codec.RAW
    max_shard_bytes: int = 64 << 10
    sites: tuple[str, ...] = ("rot_q", "rot_k", "v", "z")
    layer_numbers: tuple[int, ...] = ()
    """The model's numbers of the layers; none: 0, 1, ..."""

    @property
    def layers(self) -> list[int]:
        return list(self.layer_numbers or range(self.num_layers))

    def heads(self, site: str) -> int:
        return self.num_kv_heads if site in ("rot_k", "v") else self.num_heads

    def geometry(self, site: str, num_tokens: int) -> ArrayGeometry:
        heads = self.heads(site)
        return ArrayGeometry.plan(
            num_layers=self.num_layers,
            num_tokens=num_tokens,
            num_heads=heads,
            shard_heads=max(1, heads // self.ranks),
            head_size=self.head_size,
            item_bytes=DTYPES[self.dtype].itemsize,
            max_shard_bytes=self.max_shard_bytes,
        )


@dataclass
class SampleUnit:
    """One unit's truth. A prompt of 0 tokens stands for one that failed."""

    unit: int
    first_prompt: int
    lengths: list[int]
    arrays: dict[str, Array] = field(default_factory=dict)
    """site -> [L, T, H, D]"""


def make_unit(
    shape: SampleShape, unit: int, first_prompt: int, lengths: list[int], seed: int
) -> SampleUnit:
    """Return a unit of random values, the same for the same seed."""
    rng = np.random.default_rng([seed, unit])
    sample = SampleUnit(unit, first_prompt, lengths)
    for site in shape.sites:
        size = (shape.num_layers, sum(lengths), shape.heads(site), shape.head_size)
        sample.arrays[site] = rng.standard_normal(size).astype(DTYPES[shape.dtype])
    return sample


def write_unit(
    objects: ObjectStore,
    shape: SampleShape,
    sample: SampleUnit,
    attempt: str,
    *,
    repair: int = 0,
    run_id: str | None = None,
) -> Commit:
    """Put every object of one attempt and return the commit, not yet made."""
    run_id = run_id or RUN_ID
    writer = AttemptWriter(objects, sample.unit, attempt, run_id=run_id)
    num_tokens = sum(sample.lengths)
    records: list[ObjectRecord] = []
    arrays: list[ArrayRecord] = []
    for site in shape.sites if num_tokens else ():
        geometry = shape.geometry(site, num_tokens)
        sizes: dict[str, str] = {}
        for coordinates in geometry.shard_coordinates():
            layer, token_shard, head_shard, _ = coordinates
            tokens = slice(
                token_shard * geometry.shard_tokens, (token_shard + 1) * geometry.shard_tokens
            )
            heads = slice(
                head_shard * geometry.shard_heads, (head_shard + 1) * geometry.shard_heads
            )
            data_HTD = np.ascontiguousarray(
                sample.arrays[site][layer, tokens, heads].swapaxes(0, 1)
            )
            key = writer.shard_key(site, coordinates)
            encoded = encode_shard(geometry, token_shard, data_HTD, shape.codec, key)
            record = writer.put_shard(encoded)
            records.append(record)
            if shape.codec is not Codec.RAW:
                sizes[record.name] = pack_chunk_sizes(encoded.chunk_sizes)
        arrays.append(array_record(shape, site, geometry, sizes))
    records += writer.put_metadata(arrays)
    first_row = np.concatenate(([0], np.cumsum(sample.lengths)[:-1])).tolist()
    heads_of = {site: list(range(shape.heads(site))) for site in shape.sites}
    return Commit(
        run_id=run_id,
        unit=sample.unit,
        attempt=attempt,
        repair=repair,
        first_prompt=sample.first_prompt,
        model_crc32c=model_manifest(shape).fingerprint,
        plan_hash=plan_hash_of(objects, sample.unit),
        arrays=arrays,
        objects=records,
        prompts=PromptOutcomes(
            outcome=[Outcome.STORED if length else Outcome.FAILED for length in sample.lengths],
            first_row=first_row,
            num_rows=sample.lengths,
            first_position=[0] * len(sample.lengths),
            reasons={str(i): "empty prompt" for i, n in enumerate(sample.lengths) if not n},
        ),
        ranks=[
            RankRecord(
                rank=0, heads=heads_of, objects=len(records), bytes=sum(r.bytes for r in records)
            )
        ],
    )


def array_record(
    shape: SampleShape, site: str, geometry: ArrayGeometry, chunk_sizes: dict[str, str]
) -> ArrayRecord:
    head_dim = "kv_head" if site in ("rot_k", "v") else "head"
    return ArrayRecord.of(
        geometry,
        site=site,
        dtype=shape.dtype,
        dims=["layer", "token", head_dim, "d_head"],
        layers=shape.layers,
        heads=list(range(geometry.num_heads)),
        codec=shape.codec,
        chunk_sizes=chunk_sizes,
    )


def capture(
    objects: ObjectStore,
    shape: SampleShape,
    sample: SampleUnit,
    attempt: str = "a0",
    *,
    repair: int = 0,
) -> CommitResult:
    """Write and commit one unit."""
    return commit_unit(objects, write_unit(objects, shape, sample, attempt, repair=repair))


def write_manifests(
    objects: ObjectStore, shape: SampleShape, lengths: list[list[int]], **config: Any
) -> None:
    """Write run.json, model.json and the plan for units of these prompt lengths."""
    run = RunManifest(
        run_id=RUN_ID,
        created="2026-01-01T00:00:00Z",
        frozen={},
        config={"model": "sample", **config},
        versions={},
    )
    objects.create(keys.RUN, run.to_bytes())
    objects.create(keys.MODEL, model_manifest(shape).to_bytes())
    write_segment(objects, run_id=RUN_ID, segment=0, **plan_tables(lengths))


def model_manifest(shape: SampleShape) -> ModelManifest:
    """Return the model that every sample run of this shape is captured from."""
    layers = [
        LayerSemantics(
            layer=i,
            module=f"model.layers.{i}.self_attn.attn",
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            v_head_size=shape.head_size,
            scale=shape.head_size**-0.5,
        )
        for i in shape.layers
    ]
    dtype: Any = shape.dtype
    return ModelManifest(
        run_id=RUN_ID,
        architecture="SampleForCausalLM",
        dtype=dtype,
        hidden_size=shape.num_heads * shape.head_size,
        layers=layers,
    )


def plan_tables(lengths: list[list[int]]) -> dict[str, pa.Table]:
    """Return the prompts and units tables of a plan whose units have these prompt lengths."""
    flat = [n for unit in lengths for n in unit]
    prompts = pa.table(
        {
            "prompt_id": [f"p{i}" for i in range(len(flat))],
            "text": [f"prompt {i}" for i in range(len(flat))],
            "token_ids": [list(range(n)) for n in flat],
            "token_strings": [[f"t{j}" for j in range(n)] for n in flat],
            "num_tokens": flat,
            "plan_reason": [None if n else "empty prompt" for n in flat],
        },
        schema=PROMPT_FIELDS,
    ).append_column("split", pa.array(["test" if i % 2 else "train" for i in range(len(flat))]))
    counts = [len(unit) for unit in lengths]
    units = pa.table(
        {
            "unit": list(range(len(lengths))),
            "first_prompt": [sum(counts[:i]) for i in range(len(counts))],
            "num_prompts": counts,
            "num_tokens": [sum(unit) for unit in lengths],
        },
        schema=UNIT_FIELDS,
    )
    return {"prompts": prompts, "units": units}


def plan_hash_of(objects: ObjectStore, unit: int) -> str | None:
    """Return the hash of the plan segment that has a unit; None where none has."""
    for one in read_segments(objects):
        if one.first_unit <= unit < one.first_unit + one.num_units:
            return one.plan_hash
    return None


def plan_file(objects: ObjectStore, kind: str, place: int = 0, segment: int = 0) -> str:
    """Return the name of a plan's file of `prompts` or `units`."""
    files = getattr(read_manifest(objects, segment), kind)
    return f"{keys.plan_prefix(segment)}{files[place].name}"


def sample_units(shape: SampleShape, lengths: list[list[int]], seed: int = 7) -> list[SampleUnit]:
    """Return one unit of random values per list of prompt lengths."""
    firsts = np.concatenate(([0], np.cumsum([len(unit) for unit in lengths])[:-1])).tolist()
    return [make_unit(shape, i, firsts[i], unit, seed) for i, unit in enumerate(lengths)]


def write_run(
    objects: ObjectStore, shape: SampleShape, lengths: list[list[int]], seed: int = 7
) -> list[SampleUnit]:
    """Write a complete run and return its truth."""
    samples = sample_units(shape, lengths, seed)
    write_manifests(objects, shape, lengths)
    for sample in samples:
        capture(objects, shape, sample)
    return samples
