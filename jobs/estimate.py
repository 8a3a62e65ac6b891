"""What a run will store and how long it will take, before any engine starts. Pure arithmetic.

Bytes of raw arrays are exact: they come from the same geometry that cuts the arrays, unit by unit,
with checksums, indexes and the filled-up last chunks; where prompts are continued they are the most
there can be, since a prompt may end early. What a codec makes of them is an expectation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from capture.heads import select_heads
from jobs.config import PatternMode, RunConfig
from jobs.model_identity import AttentionShape
from store.codec import DTYPES, Codec
from store.geometry import ArrayGeometry
from store.packed_pattern import plan_pattern
from store.run_format import Site

EXPECTED_RATIO = {Codec.RAW: 1.0, Codec.FAST: 1.2, Codec.SMALL: 1.35}
"""Raw bytes over stored bytes; what attention tensors gave in benchmarks, models differ."""

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What the estimate of time and cost assumes; all of the user's own knowing."""

    tokens_per_second: float | None = None
    """Of one worker's engine while it captures."""
    store_bytes_per_second: float | None = None
    """What the object store takes in, from all workers together."""
    dollars_per_tb_month: float | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A run that is still to be done, in numbers."""

    prompts: int
    unusable: int
    tokens: int
    """What the engines compute; with generation the most there can be."""
    rows: int
    """Those of them that are stored: `capture.positions` may leave some out."""
    units: int
    site_bytes: dict[str, int]
    """Site -> raw bytes, exact; with generation the most there can be."""
    upper_bound: bool
    """Whether rows and bytes are the most there can be: prompts are continued and may end early."""
    objects: int
    stored_bytes: int
    """Expected bytes with the run's codec."""
    hours: float | None
    bound_by: str | None
    dollars_per_month: float | None
    cut_short: int = 0
    """Prompts whose generated tokens end at the longest sequence, if not before."""
    largest_unit_bytes: int = 0
    """Of the rows and patterns of the largest unit on each rank, while it is in flight."""
    buffer_bytes: int = 0
    """What the config gives them."""
    layers: tuple[int, ...] = ()
    """The model's numbers of those that are captured."""
    without_attention: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Kind -> layers of which nothing is captured, because they have no attention."""

    @property
    def raw_bytes(self) -> int:
        return sum(self.site_bytes.values())

    def as_json(self) -> dict[str, Any]:
        """Return the estimate as `attnstore run --dry-run --json` prints it."""
        return {
            "layers": list(self.layers),
            "layers_without_attention": {k: list(at) for k, at in self.without_attention.items()},
            "prompts": self.prompts,
            "unusable_prompts": self.unusable,
            "prompts_cut_short": self.cut_short,
            "tokens": self.tokens,
            "rows": self.rows,
            "units": self.units,
            "largest_unit_bytes": self.largest_unit_bytes,
            "upper_bound": self.upper_bound,
            "raw_bytes_per_site": self.site_bytes,
            "raw_bytes": self.raw_bytes,
            "expected_bytes": self.stored_bytes,
            "objects": self.objects,
            "hours": self.hours,
            "bound_by": self.bound_by,
            "dollars_per_month": self.dollars_per_month,
        }


def estimate(
    config: RunConfig,
    shape: AttentionShape,
    unit_rows: Iterable[int],
    *,
    unit_entries: Iterable[int] = (),
    tokens: int | None = None,
    prompts: int,
    unusable: int,
    cut_short: int = 0,
    rates: Rates,
) -> Estimate:
    """Return what units U of so many stored rows (generated ones included) will take.

    `unit_entries` are those of the units' packed patterns, where they are stored (`stored_rows`).
    `tokens` is how many the engines compute for them, where it is not the rows alone.
    """
    rows_U = np.fromiter(unit_rows, dtype=np.int64)
    entries_U = np.fromiter(unit_entries, dtype=np.int64)
    sizes, counts = np.unique(rows_U, return_counts=True)
    numbers = shape.captured(config.capture.layers)
    layers = len(numbers)
    site_bytes = dict.fromkeys(map(str, config.capture.sites), 0)
    objects = 0
    for num_rows, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        objects += count * 2  # the group's zarr.json and the commit
        if not num_rows:
            continue
        objects += count * bool(config.generate.tokens)  # generated.parquet
        for site in config.capture.sites:
            cut = _geometry(config, shape, site, layers, num_rows)
            shards = [cut.raw_shard_bytes(place) for place in range(cut.num_token_shards)]
            site_bytes[str(site)] += count * sum(shards) * layers * cut.num_head_shards
            objects += count * (len(shards) * layers * cut.num_head_shards + 1)
    if config.capture.pattern is PatternMode.STORED:
        site_bytes[Site.PATTERN.value] = 0
        for entries in entries_U.tolist():
            cut = _pattern_geometry(config, shape, layers, entries)
            shards = [cut.raw_shard_bytes(place) for place in range(cut.num_token_shards)]
            site_bytes[Site.PATTERN.value] += sum(shards) * layers * cut.num_head_shards
            objects += (len(shards) * layers * cut.num_head_shards + 1) if entries else 0
    rows = int((sizes * counts).sum())
    total = rows if tokens is None else tokens
    stored = int(sum(site_bytes.values()) / EXPECTED_RATIO[config.capture.codec])
    hours, bound = _time(config, total, stored, rates)
    cost = rates.dollars_per_tb_month
    bytes_U = rows_U * rank_row_bytes(config, shape)
    if len(entries_U):
        bytes_U += entries_U * rank_entry_bytes(config, shape)
    return Estimate(
        prompts=prompts,
        unusable=unusable,
        cut_short=cut_short,
        tokens=total,
        rows=rows,
        units=int(counts.sum()),
        site_bytes=site_bytes,
        upper_bound=bool(config.generate.tokens) and not config.generate.ignore_eos,
        objects=objects,
        stored_bytes=stored,
        hours=hours,
        bound_by=bound,
        dollars_per_month=stored / 1e12 * cost if cost is not None else None,
        largest_unit_bytes=int(bytes_U.max(initial=0)),
        buffer_bytes=config.engine.buffer_bytes,
        layers=numbers,
        without_attention=shape.others,
    )


def _geometry(
    config: RunConfig, shape: AttentionShape, site: Site, layers: int, num_tokens: int
) -> ArrayGeometry:
    heads, shard_heads = held_heads(config, shape, site)
    head_size = shape.v_head_size if site.is_of_v else shape.head_size
    return ArrayGeometry.plan(
        num_layers=layers,
        num_tokens=num_tokens,
        num_heads=heads,
        shard_heads=shard_heads,
        head_size=head_size,
        item_bytes=DTYPES[config.model.dtype].itemsize,
    )


def rank_row_bytes(config: RunConfig, shape: AttentionShape) -> int:
    """Return the bytes that one row of all sites takes on the rank that holds most of it.

    Where patterns are stored, rows of rot_q and rot_k are kept a second time until a prompt is
    whole; the patterns themselves are `rank_entry_bytes`. A probe's rows are not counted.
    """
    layers = len(shape.captured(config.capture.layers))
    kept = (Site.ROT_Q, Site.ROT_K) if config.capture.pattern is PatternMode.STORED else ()
    return layers * sum(
        held_heads(config, shape, site)[1]
        * (shape.v_head_size if site.is_of_v else shape.head_size)
        * DTYPES[config.model.dtype].itemsize
        for site in (*config.capture.sites, *kept)
    )


def rank_entry_bytes(config: RunConfig, shape: AttentionShape) -> int:
    """Return the bytes that one entry of stored patterns takes on a rank; 0 where none are."""
    if config.capture.pattern is not PatternMode.STORED:
        return 0
    layers = len(shape.captured(config.capture.layers))
    heads = held_heads(config, shape, Site.PATTERN)[1]
    return layers * heads * DTYPES[config.capture.pattern_dtype].itemsize


def held_heads(config: RunConfig, shape: AttentionShape, site: Site) -> tuple[int, int]:
    """Return how many heads of a site all ranks store, and how many each one that writes."""
    heads = shape.kv_heads if site.is_kv else shape.heads
    ranks = config.engine.tensor_parallel_size
    local = max(1, heads // ranks)
    if config.capture.heads is None:
        return heads, local
    head_bytes = max(shape.head_size, shape.v_head_size) * DTYPES[config.model.dtype].itemsize
    held = select_heads(config.capture.heads, shape.heads, shape.kv_heads, ranks, head_bytes)[0]
    each = len(held.kv if site.is_kv else held.query)
    return each * (heads // local), each


def _pattern_geometry(
    config: RunConfig, shape: AttentionShape, layers: int, entries: int
) -> ArrayGeometry:
    held, each = held_heads(config, shape, Site.PATTERN)
    return plan_pattern(
        num_layers=layers,
        entries=entries,
        num_heads=held,
        shard_heads=each,
        dtype=config.capture.pattern_dtype,
    )


def _time(
    config: RunConfig, tokens: int, stored: int, rates: Rates
) -> tuple[float | None, str | None]:
    """Hours of the slower of the two stages, and which it is."""
    seconds: dict[str, float] = {}
    if rates.tokens_per_second:
        seconds["the engines"] = tokens / (rates.tokens_per_second * config.workers.highest)
    if rates.store_bytes_per_second:
        seconds["the store"] = stored / rates.store_bytes_per_second
    if not seconds:
        return None, None
    slowest = max(seconds, key=lambda name: seconds[name])
    bound = slowest if len(seconds) > 1 else None
    return seconds[slowest] / SECONDS_PER_HOUR, bound
