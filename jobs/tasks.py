"""Orders into tasks: reads the token ids of a unit's prompts from the stored plan, in the worker.

Plan files are small and neighbours share them, so the last few are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from capture.settings import PromptTask, UnitTask
from jobs.messages import UnitOrder
from jobs.prompt import SKIPPED
from store.objects.protocol import ObjectStore
from store.plan import read_prompt_file, read_segments
from store.run_format import PlanManifest

_KEPT_FILES = 4
_SAMPLED_FROM = 1024
_COLUMNS = ("token_ids", "plan_reason")


class TaskReader:
    """Reads the prompts of units from the plan of the run in `objects`."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._segments: dict[int, PlanManifest] = {}
        self._files: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()

    def task(self, order: UnitOrder) -> UnitTask:
        """Return the task that an order means."""
        if order.segment not in self._segments:
            self._segments = {m.segment: m for m in read_segments(self._objects)}
        manifest = self._segments[order.segment]
        masked = dict(order.masked)
        prompts: list[PromptTask] = []
        start = manifest.first_prompt
        for place, file in enumerate(manifest.prompts):
            low = max(order.first_prompt, start)
            high = min(order.first_prompt + order.num_prompts, start + file.rows)
            if low < high:
                table = self._file(manifest, place).slice(low - start, high - low)
                prompts += _prompts(table, masked, low - order.first_prompt)
            start += file.rows
        assert len(prompts) == order.num_prompts, (order, len(prompts))
        return UnitTask(
            unit=order.unit,
            attempt=order.attempt,
            first_prompt=order.first_prompt,
            prompts=tuple(prompts),
            batch_prompts=order.batch_prompts,
            repair=order.repair,
            plan_hash=manifest.plan_hash,
        )

    def sample_prompts(self, count: int) -> list[np.ndarray]:
        """Return the token ids of `count` of the plan's first prompts that can be captured.

        The longest, the shortest and some between, the longest first: of short prompts alone, as a
        plan may begin with, a check would learn nothing.
        """
        first = sorted(islice(self._usable(), _SAMPLED_FROM), key=len, reverse=True)
        places = np.linspace(0, len(first) - 1, min(count, len(first))).round().astype(int)
        return [first[place] for place in places.tolist()]

    def _usable(self) -> Iterator[np.ndarray]:
        """Yield the token ids of the plan's prompts that can be captured, file by file."""
        for manifest in read_segments(self._objects):
            for place in range(len(manifest.prompts)):
                table = self._file(manifest, place)
                usable = table.filter(pc.is_null(table["plan_reason"]))
                yield from (
                    task.token_ids for task in _prompts(usable.slice(0, _SAMPLED_FROM), {}, 0)
                )

    def _file(self, manifest: PlanManifest, place: int) -> pa.Table:
        key = (manifest.segment, place)
        table = self._files.pop(key, None)
        if table is None:
            table = read_prompt_file(self._objects, manifest, place, _COLUMNS)
        self._files[key] = table
        while len(self._files) > _KEPT_FILES:
            self._files.popitem(last=False)
        return table


def _prompts(table: pa.Table, masked: dict[int, str], first_place: int) -> list[PromptTask]:
    reasons = table["plan_reason"].to_pylist()
    return [
        PromptTask(
            token_ids=np.asarray(ids.values.to_numpy(zero_copy_only=False), dtype=np.int32),
            reason=reason if reason is not None else masked.get(place),
            skipped=reason == SKIPPED,
        )
        for place, (ids, reason) in enumerate(
            zip(table["token_ids"], reasons, strict=True), start=first_place
        )
    ]
