"""Make a captured unit part of the run: check what the ranks report, then commit it.

Nothing is trusted that can be counted: every shard that the unit's geometry asks for must be
reported by exactly one rank, every site must have proved its rows on every layer, and the heads of
the ranks must make up all heads in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from capture.assembly import RankReport
from capture.errors import RowsMissing
from capture.heads import select_heads
from capture.pattern_rows import first_entries
from capture.rank import RankFacts
from capture.rows import UnitLayout
from capture.settings import CaptureSettings, UnitTask
from store.attempt import AttemptWriter
from store.codec import DTYPES, Codec
from store.commit import CommitResult, commit_unit
from store.generated import GENERATED, Continuation, generated_bytes
from store.geometry import ArrayGeometry
from store.objects.protocol import ObjectStore
from store.packed_pattern import plan_pattern
from store.run_format import (
    ArrayRecord,
    Commit,
    LayerSemantics,
    ObjectRecord,
    Outcome,
    PromptOutcomes,
    RankRecord,
)
from store.shard_index import pack_chunk_sizes


@dataclass(frozen=True, slots=True)
class StoredSite:
    """One site as it is stored: heads of all ranks, size and type of a head's row."""

    name: str
    head_dim: str
    num_heads: int
    head_size: int
    dtype: str
    packed: bool = False
    """Whether its rows are entries of packed patterns."""


@dataclass(frozen=True, slots=True)
class CaptureShape:
    """What every unit of this engine has in common."""

    run_id: str
    dtype: str
    layers: tuple[LayerSemantics, ...]
    settings: CaptureSettings
    ranks: tuple[RankFacts, ...]

    @property
    def sites(self) -> list[StoredSite]:
        """The run's sites, those of the probe included."""
        layer = self.layers[0]
        sites = [
            StoredSite(
                site.value,
                site.head_dim_name,
                layer.num_kv_heads if site.is_kv else layer.num_heads,
                layer.v_head_size if site.is_of_v else layer.head_size,
                self.dtype,
            )
            for site in self.settings.sites
        ]
        if self.settings.pattern is not None:
            heads = layer.num_heads
            sites.append(
                StoredSite("pattern", "head", heads, 1, self.settings.pattern, packed=True)
            )
        return sites + [
            StoredSite(
                probe.name,
                "head",
                layer.num_heads,
                probe.head_size,
                str(probe.dtype).removeprefix("torch."),
            )
            for probe in self.ranks[0].probes
        ]

    def site_heads(self, site: StoredSite) -> list[int]:
        """Return the site's stored global heads, rank after rank, as the selection's rule has it.

        Raises `RowsMissing` where the ranks write others.
        """
        heads = [head for rank in self.ranks for head in rank.heads[site.name]]
        due = self._due_heads(site)
        if heads != due:
            raise RowsMissing(f"the ranks write heads {heads} of {site.name}, {due} are due")
        return heads

    def _due_heads(self, site: StoredSite) -> list[int]:
        if self.settings.heads is None:
            return list(range(site.num_heads))
        layer = self.layers[0]
        head_bytes = max(layer.head_size, layer.v_head_size) * DTYPES[self.dtype].itemsize
        held = select_heads(
            self.settings.heads,
            layer.num_heads,
            layer.num_kv_heads,
            len(self.ranks),
            head_bytes,
        )
        is_kv = site.head_dim == "kv_head"
        # A set: KV heads are replicated where ranks exceed them.
        return sorted({head for heads in held for head in (heads.kv if is_kv else heads.query)})

    def array(self, site: StoredSite, num_tokens: int, chunk_sizes: dict[str, str]) -> ArrayRecord:
        """Describe the site's array in a unit of `num_tokens` rows, or entries."""
        heads = self.site_heads(site)
        shard_heads = max(len(rank.heads[site.name]) for rank in self.ranks)
        if site.packed:
            cut = plan_pattern(
                num_layers=len(self.layers),
                entries=num_tokens,
                num_heads=len(heads),
                shard_heads=shard_heads,
                dtype=site.dtype,
            )
        else:
            cut = ArrayGeometry.plan(
                num_layers=len(self.layers),
                num_tokens=num_tokens,
                num_heads=len(heads),
                shard_heads=shard_heads,
                head_size=site.head_size,
                item_bytes=DTYPES[site.dtype].itemsize,
            )
        return ArrayRecord.of(
            cut,
            site=site.name,
            dtype=site.dtype,
            dims=["layer", "head", "entry"]
            if site.packed
            else ["layer", "token", site.head_dim, "d_head"],
            layers=[layer.layer for layer in self.layers],
            heads=heads,
            codec=self.settings.codec,
            chunk_sizes=chunk_sizes,
        )


def commit_captured_unit(
    objects: ObjectStore,
    shape: CaptureShape,
    task: UnitTask,
    layout: UnitLayout,
    reasons: dict[int, str],
    reports: Sequence[RankReport],
    timings: dict[str, float],
    *,
    model_crc32c: str | None = None,
    said: dict[int, Continuation] | None = None,
) -> tuple[CommitResult, Commit]:
    """Check the ranks' reports against the task and make the one create-only commit.

    `reasons` says why prompts (by place in the unit) were not captured, `said` what was generated
    after the others, where anything was; `model_crc32c` is the model's fingerprint. Raises
    `RowsMissing` where anything is missing or there twice, and the store's `CommitRefused` where
    objects are.
    """
    total, entries = layout.total_rows, int(first_entries(layout)[-1])
    records = _rank_objects(shape, layout, reports)
    arrays: list[ArrayRecord] = []
    if total:
        sizes = {name: size for report in reports for name, size in report.chunk_sizes.items()}
        for site in shape.sites:
            prefix = f"{site.name}/"
            arrays.append(
                shape.array(
                    site,
                    entries if site.packed else total,
                    {}
                    if shape.settings.codec is Codec.RAW
                    else {n: pack_chunk_sizes(s) for n, s in sizes.items() if n.startswith(prefix)},
                )
            )
        _check_shards(arrays, {record.name for record in records})
    writer = AttemptWriter(objects, task.unit, task.attempt, run_id=shape.run_id)
    records += writer.put_metadata(arrays)
    if said:
        records.append(writer.put_object(GENERATED, generated_bytes(sorted(said.items()))))
    commit = Commit(
        run_id=shape.run_id,
        unit=task.unit,
        attempt=task.attempt,
        repair=task.repair,
        first_prompt=task.first_prompt,
        model_crc32c=model_crc32c,
        plan_hash=task.plan_hash,
        prompts=_outcomes(task, layout, reasons),
        arrays=arrays,
        objects=sorted(records, key=lambda record: record.name),
        ranks=[
            RankRecord(
                rank=rank.rank,
                heads={site: list(heads) for site, heads in rank.heads.items()},
                objects=len(report.objects),
                bytes=sum(record.bytes for record in report.objects),
            )
            for rank, report in zip(shape.ranks, reports, strict=True)
        ],
        timings={name: round(seconds, 6) for name, seconds in timings.items()},
    )
    return commit_unit(objects, commit), commit


def _rank_objects(
    shape: CaptureShape, layout: UnitLayout, reports: Sequence[RankReport]
) -> list[ObjectRecord]:
    records: list[ObjectRecord] = []
    for rank, report in zip(shape.ranks, reports, strict=True):
        for site in shape.sites:
            rows = int(first_entries(layout)[-1]) if site.packed else layout.total_rows
            expected = rows * len(shape.layers)
            writes = bool(rank.heads[site.name])
            proved = report.rows.get(site.name, 0)
            if proved != (expected if writes else 0):
                raise RowsMissing(
                    f"unit {layout.unit}: rank {rank.rank} proved {proved} rows of {site.name} "
                    f"over {len(shape.layers)} layers, {expected} were due",
                    rank.rank,
                )
        records += report.objects
    return records


def _check_shards(arrays: Sequence[ArrayRecord], names: set[str]) -> None:
    due = {
        array.shard_name(*place) for array in arrays for place in array.geometry().shard_places()
    }
    if due != names:
        raise RowsMissing(
            f"the ranks wrote {len(names)} shards, {len(due)} were due; missing "
            f"{sorted(due - names)[:5]}, unknown {sorted(names - due)[:5]}"
        )


def _outcomes(task: UnitTask, layout: UnitLayout, reasons: dict[int, str]) -> PromptOutcomes:
    ran = layout.num_rows > 0
    return PromptOutcomes(
        outcome=[
            Outcome.STORED if stored else Outcome.SKIPPED if prompt.skipped else Outcome.FAILED
            for stored, prompt in zip(ran, task.prompts, strict=True)
        ],
        first_row=np.where(ran, layout.first_row, 0).tolist(),
        num_rows=layout.num_rows.tolist(),
        first_position=np.where(ran, layout.first_position, 0).tolist(),
        reasons={str(place): reason for place, reason in sorted(reasons.items())},
    )
