"""Orders into tasks: reads the token ids of a unit's prompts from the stored plan, in the worker.

Plan files are small and neighbours share them, so the last few are kept.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pyarrow as pa

from capture.settings import PromptTask, UnitTask
from jobs.messages import UnitOrder
from jobs.prompt import SKIPPED
from store.objects.protocol import ObjectStore
from store.plan import read_prompt_file, read_segments
from store.run_format import PlanManifest

_KEPT_FILES = 4
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

    def first_prompts(self, count: int) -> list[np.ndarray]:
        """Return the token ids of the plan's first prompts that can be captured."""
        found: list[np.ndarray] = []
        for manifest in read_segments(self._objects):
            for place in range(len(manifest.prompts)):
                tasks = _prompts(self._file(manifest, place), {}, 0)
                found += [task.token_ids for task in tasks if task.reason is None][:count]
                if len(found) >= count:
                    return found[:count]
        return found

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
