"""Everything that capture does on one tensor-parallel rank.

The adapters call it: `open` once the model is loaded, `begin_step` before each forward pass,
`end_step` after it, and the RPCs of the engine in between. It knows torch and the taps, but nothing
of nnsight or vLLM beyond the attention layers that it is handed.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from capture.assembly import Assembly, RankReport
from capture.attention_layers import LocalLayer, local_semantics, refuse_shared_sites
from capture.errors import CaptureError, RowsMissing, UnsupportedModel
from capture.heads import HeadShare, HeadSlice, head_share, head_slices, select_heads
from capture.lanes import Lane, OnAnswer, process_lanes, thread_lanes
from capture.pattern_rows import PatternRecipe, first_entries, require_rows
from capture.probe import Probe, ProbeSite
from capture.rows import Span, StepRows, UnitLayout, plan_step
from capture.settings import CaptureSettings, StoreLocation
from capture.shard_loop import OpenUnit, Tap
from capture.slabs import TapShape
from capture.staging import NUM_DEVICE_SLOTS, Staging
from capture.step_block import LayerReads
from store.codec import DTYPES
from store.geometry import ArrayGeometry
from store.objects.open import open_store
from store.packed_pattern import plan_pattern
from store.run_format import Site

OnProjected = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank tells the engine once it is open."""

    rank: int
    layers: tuple[LocalLayer, ...]
    heads: dict[str, tuple[int, ...]]
    """Site -> the global heads that this rank writes; empty where another rank writes them."""
    probes: tuple[ProbeSite, ...]
    """What the probe adds, on every rank the same."""
    bytes_per_row: int
    host_bytes: int
    device_bytes: int
    max_step_rows: int
    kept_bytes_per_row: int = 0
    """Rows that are kept beside their shards until a prompt is whole, for its patterns."""
    bytes_per_entry: int = 0
    """An entry of the stored patterns, over all layers and the rank's heads."""


@dataclass(frozen=True, slots=True)
class _SiteShare:
    name: str
    share: HeadShare
    head_size: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return len(self.share.held) * self.head_size * self.dtype.itemsize

    def geometry(self, num_layers: int, num_tokens: int) -> ArrayGeometry:
        return ArrayGeometry.plan(
            num_layers=num_layers,
            num_tokens=num_tokens,
            num_heads=self.share.num_held,
            shard_heads=len(self.share.held),
            head_size=self.head_size,
            item_bytes=self.dtype.itemsize,
        )

    def tap_shape(self) -> TapShape:
        cut = self.geometry(1, 1)
        return TapShape(
            num_heads=len(self.share.held),
            head_size=self.head_size,
            item_bytes=self.dtype.itemsize,
            group_heads=cut.group_heads,
            chunk_tokens=cut.chunk_tokens,
        )

    def head_slices(self) -> tuple[HeadSlice, ...]:
        return head_slices(self.share, self.tap_shape().group_heads)


class RankCapture:
    """Capture on one rank: staging, assembly, and the row plan of the current step."""

    def __init__(
        self,
        *,
        settings: CaptureSettings,
        layers: Sequence[LocalLayer],
        envoy_of: Callable[[str], Any],
        watch_projection: Callable[[LocalLayer, OnProjected], None],
        watch_output: Callable[[LocalLayer, Callable[[torch.Tensor], None]], None],
        rank: int,
        num_ranks: int,
        total_heads: int,
        total_kv_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        max_step_rows: int,
    ) -> None:
        self.settings, self.rank, self.num_ranks = settings, rank, num_ranks
        self.device, self.dtype = device, dtype
        self.layers = tuple(layers)
        self.taken = _wanted_layers(self.layers, settings.layers)
        first = _uniform(self.taken)
        require_rows(settings.pattern, settings.sites, settings.positions)
        refuse_shared_sites(self.taken, settings.sites)
        q_share = head_share(total_heads, first.num_heads, rank, num_ranks)
        kv_share = head_share(total_kv_heads, first.num_kv_heads, rank, num_ranks)
        if settings.heads is not None:
            head_bytes = max(first.head_size, first.v_head_size) * dtype.itemsize
            held = select_heads(settings.heads, total_heads, total_kv_heads, num_ranks, head_bytes)[
                rank
            ]
            q_share = replace(q_share, held=held.query)
            kv_share = replace(kv_share, held=held.kv)
        self._probe = (
            None
            if settings.probe is None
            else Probe(settings.probe, first, dtype, device, settings.probe_source)
        )
        wanted = set(settings.sites)

        def kept(site: Site, share: HeadShare, head_size: int) -> list[_SiteShare]:
            return [_SiteShare(site.value, share, head_size, dtype)] if site in wanted else []

        # The order in which a layer's tensors come to be; `put` insists on it.
        self.sites = [
            *kept(Site.PRE_Q, q_share, first.head_size),
            *kept(Site.PRE_K, kv_share, first.head_size),
            *kept(Site.ROT_Q, q_share, first.head_size),
            *kept(Site.ROT_K, kv_share, first.head_size),
            *kept(Site.V, kv_share, first.v_head_size),
            *kept(Site.Z, q_share, first.v_head_size),
            *(_SiteShare(p.name, q_share, p.head_size, p.dtype) for p in self._probe_sites),
            *kept(Site.PROJ_IN, q_share, first.v_head_size),
        ]
        taps: list[Tap] = []
        self._tap_sites: list[_SiteShare] = []
        self._unproven: dict[int, torch.Tensor | None] = {}
        """Taps of z until it is seen, in the first step, that W_O takes z as it is."""
        self.reads: list[LayerReads] = []
        feeding = () if settings.pattern is None else (Site.ROT_Q, Site.ROT_K)
        patterns: list[Tap] = []
        for index, layer in enumerate(self.taken):
            numbers: dict[str, int] = {}
            for site in self.sites:
                if (writes := site.share.writes) or site.name in feeding:
                    numbers[site.name] = len(taps)
                    shard = site.share.shard
                    taps.append(Tap(site.name, index, shard, site.row_bytes, writes=writes))
                    self._tap_sites.append(site)
            if settings.pattern is not None:
                recipe = PatternRecipe(
                    numbers[Site.ROT_Q],
                    numbers[Site.ROT_K],
                    tuple(head - q_share.first for head in q_share.held),
                    tuple(head - kv_share.first for head in kv_share.held),
                    local_semantics(layer),
                    str(dtype).removeprefix("torch."),
                    settings.pattern,
                )
                patterns.append(Tap(Site.PATTERN, index, q_share.shard, 0, recipe=recipe))
            before = (numbers.get(Site.PRE_Q), numbers.get(Site.PRE_K))
            if before != (None, None):
                watch_projection(layer, partial(self._projected, before))
            after, z = numbers.get(Site.PROJ_IN), numbers.get(Site.Z)
            if after is not None or (settings.output_weights and z is not None):
                watch_output(layer, partial(self._into_output, layer, z, after))
                if after is None and z is not None:
                    self._unproven[z] = None
            self.reads.append(
                LayerReads(
                    layer.layer,
                    envoy_of(layer.path),
                    rot_q=numbers.get(Site.ROT_Q),
                    rot_k=numbers.get(Site.ROT_K),
                    v=numbers.get(Site.V),
                    z=z,
                    probe=tuple(numbers[p.name] for p in self._probe_sites),
                )
            )
        self._taps, self._patterns, self._pattern_share = taps, patterns, q_share
        self._tap_shapes = [site.tap_shape() for site in self._tap_sites]
        self._tap_heads = [site.head_slices() for site in self._tap_sites]
        self.bytes_per_row = sum(tap.row_bytes for tap in taps)
        self.max_step_rows = max_step_rows
        largest = max((s.staged_bytes(max_step_rows) for s in self._tap_shapes), default=1)
        slot_bytes = max(settings.slot_bytes, largest)
        self._staging = Staging(
            slot_bytes=slot_bytes,
            num_slabs=_num_slabs(settings, slot_bytes, self.bytes_per_row, max_step_rows),
            num_device_slots=max(2, min(NUM_DEVICE_SLOTS, settings.device_bytes // slot_bytes)),
            device=device,
            on_slab=self._submit,
        )
        self._assembly: Assembly | None = None
        self._reports: list[RankReport] = []
        self._reports_lock = threading.Lock()
        self._step: StepRows | None = None
        self._index: torch.Tensor | None = None
        self._puts = 0
        self._spans: Sequence[Span] = ()
        self._hook_error: str | None = None
        self.timings = {"stall": 0.0, "steps": 0.0, "rows": 0.0}
        self._stall_told = 0.0

    # -- called by the engine, between steps ------------------------------------------------------

    def facts(self) -> RankFacts:
        """Return what this rank computes and holds."""
        heads = {site.name: site.share.held if site.share.writes else () for site in self.sites}
        kept = entry = 0
        if self.settings.pattern is not None:
            heads[Site.PATTERN] = self._pattern_share.held
            kept = sum(tap.row_bytes for tap in self._taps if tap.site in (Site.ROT_Q, Site.ROT_K))
            item = DTYPES[self.settings.pattern].itemsize
            entry = len(self._patterns) * len(self._pattern_share.held) * item
        return RankFacts(
            rank=self.rank,
            layers=self.layers,
            heads=heads,
            probes=self._probe_sites,
            bytes_per_row=self.bytes_per_row,
            host_bytes=self._staging.pool.num_slabs * self._staging.slot_bytes,
            device_bytes=self._staging.device_bytes,
            max_step_rows=self.max_step_rows,
            kept_bytes_per_row=kept,
            bytes_per_entry=entry,
        )

    def open(self, location: StoreLocation) -> None:
        """Say where shards go and start the writers; must come before the first unit."""
        if self._assembly is not None:
            self._assembly.close()
        settings = self.settings
        in_processes = settings.writer_processes
        if in_processes is None:
            in_processes = self.device.type == "cuda"

        def start_lanes(shares: list[dict[int, Tap]], on_answer: OnAnswer) -> list[Lane]:
            slabs = self._staging.pool.memory
            if in_processes:
                return process_lanes(
                    self.rank,
                    shares,
                    settings.codec,
                    location,
                    slabs,
                    on_answer,
                    pinned=self.device.type == "cuda",
                )
            store = open_store(location.url, location.options)
            return thread_lanes(self.rank, shares, settings.codec, store, slabs, on_answer)

        self._assembly = Assembly(
            self.rank,
            [*self._taps, *self._patterns],
            settings.writer_threads,
            self._staging.pool,
            start_lanes,
            self._reported,
        )

    def begin_unit(self, layout: UnitLayout) -> None:
        """Accept rows of an attempt from the next step on."""
        self._writers.check()
        self._writers.open_unit(self._opening(layout, held=self.settings.open_ended))

    def seal_unit(self, key: int, final: UnitLayout | None) -> None:
        """All rows of the attempt have been computed: report it once they are durable.

        `final` says how many rows each prompt got, where that was not known before.
        """
        self._staging.flush()
        self._writers.seal_unit(key, None if final is None else self._opening(final, held=False))

    def _opening(self, layout: UnitLayout, *, held: bool) -> OpenUnit:
        cuts = {site.name: site.geometry(len(self.taken), layout.total_rows) for site in self.sites}
        if self.settings.pattern is not None:
            cuts[Site.PATTERN] = plan_pattern(
                num_layers=len(self.taken),
                entries=int(first_entries(layout)[-1]),
                num_heads=self._pattern_share.num_held,
                shard_heads=len(self._pattern_share.held),
                dtype=self.settings.pattern,
            )
        return OpenUnit(layout, cuts, held)

    def fail_unit(self, key: int, reason: str) -> None:
        """Give up an attempt: its rows are still copied, then dropped; its report says `reason`."""
        self._writers.fail_unit(key, reason)

    def unit_error(self, key: int) -> str | None:
        """Return why an attempt has failed by all steps so far, once their rows are taken."""
        self._staging.flush()
        return self._writers.unit_error(key)

    def poll(self) -> list[RankReport]:
        """Return the reports that came since the last call; raise the first error of no unit."""
        self._writers.check()
        with self._reports_lock:
            reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Stop the writers."""
        if self._assembly is not None:
            self._assembly.close()

    @property
    def _writers(self) -> Assembly:
        if self._assembly is None:
            raise CaptureError("the rank was not told where to store; call open() first")
        return self._assembly

    # -- called by the model runner, around each forward pass -------------------------------------

    def begin_step(self, spans: Sequence[Span]) -> bool:
        """Plan the step's rows and wait for room; return whether any row of it is wanted."""
        if self._assembly is None:
            return False
        self._assembly.check()
        self._step = step = plan_step(spans, self._assembly.layouts())
        self._spans = spans
        self._puts = 0
        self._hook_error = None
        if not step.num_rows or not self._taps:
            self._step = None
            return False
        needed = self._staging.slabs_needed(
            [shape.staged_bytes(step.num_rows) for shape in self._tap_shapes]
        )
        self.timings["stall"] += self._staging.pool.wait_free(needed, self.settings.stall_seconds)
        self._index = None
        if step.index is not None:
            index = torch.from_numpy(step.index)
            self._index = index.to(self.device, non_blocking=True)
        return True

    def put(self, tap: int, x_TF: torch.Tensor) -> None:
        """Stage one tensor of the step; taps must come in order, each exactly once."""
        step = self._step
        if step is None or tap != self._puts:
            raise RowsMissing(
                f"tap {tap} came where tap {self._puts} was due; the model's layers did not run "
                "once each in order"
            )
        site, shape = self._tap_sites[tap], self._tap_shapes[tap]
        x_TF = x_TF.reshape(-1, site.share.local * shape.head_size)
        due = site.dtype
        if x_TF.dtype != due:
            raise RowsMissing(f"{self._taps[tap]} is {x_TF.dtype}, the run holds {due}")
        if tap in self._unproven:
            self._unproven[tap] = x_TF.clone()
        heads = self._tap_heads[tap]
        self._staging.put(tap, x_TF, shape, self._index, step.num_rows, step.runs, heads)
        self._puts += 1

    def probe(self, reads: LayerReads, q: Any, k: Any, v: Any, z: Any) -> None:
        """Run the user's probe on one layer of the step and stage what it returns."""
        assert self._probe is not None
        layer = next(one for one in self.taken if one.layer == reads.layer)
        tensors_THD = [
            x.reshape(-1, heads, size)
            for x, heads, size in (
                (q, layer.num_heads, layer.head_size),
                (k, layer.num_kv_heads, layer.head_size),
                (v, layer.num_kv_heads, layer.v_head_size),
                (z, layer.num_heads, layer.v_head_size),
            )
        ]
        found = self._probe(reads.layer, tensors_THD, self._spans)
        for tap, x_THD in zip(reads.probe, found, strict=True):
            self.put(tap, x_THD)

    @property
    def _probe_sites(self) -> tuple[ProbeSite, ...]:
        return () if self._probe is None else self._probe.sites

    def _projected(
        self, taps: tuple[int | None, int | None], q_TF: torch.Tensor, k_TF: torch.Tensor
    ) -> None:
        """Stage q and k of a layer before norm and RoPE, where a step is being captured."""
        for tap, x_TF in zip(taps, (q_TF, k_TF), strict=True):
            if tap is not None:
                self._put_from_hook(tap, x_TF)

    def _put_from_hook(self, tap: int, x_TF: torch.Tensor) -> None:
        """Stage a tensor outside the block; what goes wrong fails the step's units, not the model.

        Once the block or a hook has failed, the order of taps is broken for the rest of the step.
        """
        if self._step is None or self._hook_error is not None:
            return
        try:
            self.put(tap, x_TF)
        except CaptureError:
            self._hook_error = traceback.format_exc()

    def _into_output(
        self, layer: LocalLayer, z: int | None, tap: int | None, x_TF: torch.Tensor
    ) -> None:
        """Stage W_O's input; or see once that it is z, where contributions rest on that."""
        if tap is not None:
            self._put_from_hook(tap, x_TF)
        elif self._step is not None and z is not None:
            # None: not seen yet; another layer of the same block has called the projection.
            z_TF = self._unproven.get(z)
            if z_TF is None:
                return
            del self._unproven[z]
            if not torch.equal(z_TF, x_TF):
                raise UnsupportedModel(
                    f"the output projection beside {layer.path} does not take z as it is (gated "
                    "attention): add proj_in to capture.sites, or set capture.output_weights to "
                    "false"
                )

    def end_step(self, error: str | None) -> None:
        """Account for the step; a block that failed or stopped short fails the units it served."""
        step, self._step = self._step, None
        if step is None:
            return
        self.timings["steps"] += 1
        self.timings["rows"] += step.num_rows
        error = error or self._hook_error
        if error is None and self._puts != len(self._taps):
            error = (
                f"RowsMissing: {self._puts} of {len(self._taps)} tensors of the step were seen; "
                "an attention layer did not run"
            )
        if error is not None:
            for key in {run.unit for run in step.runs}:
                self._writers.fail_unit(key, error)

    def _submit(self, slab: Any) -> None:
        self._writers.submit(slab)

    def _reported(self, report: RankReport) -> None:
        with self._reports_lock:
            stall = self.timings["stall"]
            timings = {**report.timings, "stall": stall - self._stall_told}
            self._stall_told = stall
            self._reports.append(replace(report, timings=timings))


def _wanted_layers(
    layers: Sequence[LocalLayer], wanted: tuple[int, ...] | None
) -> list[LocalLayer]:
    if wanted is None:
        return list(layers)
    known = {layer.layer: layer for layer in layers}
    missing = [number for number in wanted if number not in known]
    if missing:
        raise CaptureError(f"the model has no attention layer {missing}; it has {sorted(known)}")
    return [known[number] for number in sorted(set(wanted))]


def _uniform(layers: Sequence[LocalLayer]) -> LocalLayer:
    first = layers[0]
    shape = (first.num_heads, first.num_kv_heads, first.head_size, first.v_head_size)
    for layer in layers:
        if (layer.num_heads, layer.num_kv_heads, layer.head_size, layer.v_head_size) != shape:
            raise CaptureError(
                f"layer {layer.layer} has other heads than layer {first.layer} "
                f"({layer} against {first}); choose layers of one shape by capture.layers"
            )
    return first


def _num_slabs(
    settings: CaptureSettings, slot_bytes: int, bytes_per_row: int, max_step_rows: int
) -> int:
    """Return how many slabs fit the budget; raise where not even one full step does."""
    fitting = settings.host_bytes // slot_bytes
    needed = -(-bytes_per_row * max_step_rows // slot_bytes) * 2 + 1
    if fitting * slot_bytes < bytes_per_row * max_step_rows + 2 * slot_bytes:
        raise CaptureError(
            f"engine.host_bytes is {settings.host_bytes}, but one full step of {max_step_rows} "
            f"tokens stages {bytes_per_row * max_step_rows} bytes in slabs of {slot_bytes}; set it "
            f"to at least {needed * slot_bytes} or lower engine.max_num_batched_tokens"
        )
    return fitting
