"""The worker: one engine, one call at a time. Ray makes an actor of it in `jobs.ray_pool`.

It reads an order's prompts from the plan, admits them to its engine and steps the engine until
there is something to report. Knows neither the other workers nor the policy. When the engine can do
no more the worker says why and ends its process: whatever the engine left behind goes with it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from socket import gethostname
from typing import TYPE_CHECKING

from capture.settings import UnitResult, UnitStatus
from jobs.frozen import check_model
from jobs.messages import UnitOrder, WorkerFacts, WorkerSpec, WorkReport
from jobs.tasks import TaskReader
from store import keys
from store.checks import SelfCheckFigures, self_check_key
from store.errors import ObjectExists, ObjectNotFound, RunError, StoreError, is_store_trouble
from store.objects.local import LocalStore
from store.objects.open import open_store
from store.objects.probe import takes_objects

if TYPE_CHECKING:
    from capture.engine import CaptureEngine

GOODBYE_SECONDS = 5.0
"""How long the last report has to leave the process before it ends."""


class CaptureWorker:
    """One engine and the orders in it. All calls come one after the other."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._objects = open_store(spec.location.url, spec.location.options)
        self._tasks = TaskReader(self._objects)
        self._engine: CaptureEngine | None = None
        self._batched: dict[int, int] = {}

    def place(self) -> str:
        """Answer once the process runs; returns the node it runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start(self) -> WorkerFacts:
        """Start the engine. What it raises ends the worker.

        Raises `FrozenFieldChanged` where the model's files are not those of the run, before the
        engine is started or once it has loaded them.
        """
        started = time.monotonic()
        self._check_model("before the engine was started")
        self._engine = self._start_engine()
        return WorkerFacts(
            node=self.place(),
            pid=os.getpid(),
            engine=self._engine.facts,
            start_seconds=time.monotonic() - started,
        )

    def _check_model(self, when: str) -> None:
        if self._spec.model is not None:
            check_model(
                self._spec.model, self._spec.frozen, f"a worker on {gethostname()}, {when},"
            )

    def work(self, order: UnitOrder | None) -> WorkReport:
        """Admit an order, then step the engine until a unit or a batch of one is finished.

        With an order and room for another one it returns at once, so that the driver can fill the
        room; with None it runs what is there until something is finished.
        """
        assert self._engine is not None, "work before start"
        try:
            return self._work(self._engine, order)
        except Exception:  # noqa: BLE001 - whatever it was, this engine's state is unknown now
            _leave_soon()
            return WorkReport(
                finished=dict(self._batched),
                dead=traceback.format_exc(limit=-12),
                dead_rank=self._engine.lost_rank,
            )

    def _work(self, engine: CaptureEngine, order: UnitOrder | None) -> WorkReport:
        if order is not None:
            refused = self._admit(engine, order)
            if refused is not None:
                return WorkReport(results=(refused,), store_works=self._store_works([refused]))
            if engine.in_flight < self._spec.units_in_flight and not order.batch_prompts:
                return WorkReport()
        results: list[UnitResult] = []
        advanced = False
        while engine.in_flight and not results and not advanced:
            results += engine.advance()
            advanced = self._notice_batches(engine, results)
        report = WorkReport(
            results=tuple(results),
            finished=dict(self._batched),
            store_works=self._store_works(results),
        )
        for result in results:
            self._batched.pop(result.unit, None)
        return report

    def _store_works(self, results: Sequence[UnitResult]) -> bool:
        """Return whether the store, which failed under one of these, takes another object now.

        Never asked of a local disk: one that is nearly full takes a small object and no unit, and
        its errors say of themselves what they are of.
        """
        failed = any(result.store_failed for result in results)
        return failed and not isinstance(self._objects, LocalStore) and takes_objects(self._objects)

    def _admit(self, engine: CaptureEngine, order: UnitOrder) -> UnitResult | None:
        try:
            task = self._tasks.task(order)
        except (RunError, StoreError, OSError) as raised:
            return UnitResult(
                order.unit,
                order.attempt,
                UnitStatus.FAILED,
                error=traceback.format_exc(limit=-6),
                # The plan was there when the run began.
                store_failed=is_store_trouble(raised) or isinstance(raised, ObjectNotFound),
            )
        if order.batch_prompts:
            self._batched[order.unit] = 0
        engine.admit(task)
        return None

    def _notice_batches(self, engine: CaptureEngine, results: list[UnitResult]) -> bool:
        """Note how far units that run in batches are; tell whether one has come further."""
        reported = {result.unit for result in results}
        advanced = False
        for unit, before in self._batched.items():
            if unit not in reported:
                now = engine.prompts_finished(unit)
                advanced = advanced or now > before
                self._batched[unit] = now
        return advanced

    def _start_engine(self) -> CaptureEngine:
        from capture.engine import CaptureEngine

        spec = self._spec
        engine = CaptureEngine.start(spec.engine, spec.capture, spec.location, spec.run_id)
        self._check_model("after the engine had loaded its weights")
        if spec.self_check:
            self._self_check(engine)
        return engine

    def _self_check(self, engine: CaptureEngine) -> None:
        """Try the engine on some of the run's prompts, unless a worker of this run has done so.

        A start with other ranks or libraries tries again. The figures are kept beside the run. What
        it raises ends the worker, as a failed start does.
        """
        from capture.self_check import MAX_PROMPTS, self_check

        spec = self._spec
        ranks, versions = spec.engine.tensor_parallel_size, engine.facts.model.versions
        name = self_check_key(ranks, versions)
        if any(info.name == name for info in self._objects.list(keys.CHECKS)):
            return
        started = time.monotonic()
        prompts = self._tasks.sample_prompts(MAX_PROMPTS)
        found = self_check(engine, prompts, spec.location, spec.engine.model)
        if found is not None:
            figures = SelfCheckFigures(
                run_id=spec.run_id,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                tensor_parallel_size=ranks,
                versions=versions,
                seconds=round(time.monotonic() - started, 3),
                **found.to_json(),
            )
            with contextlib.suppress(ObjectExists):
                self._objects.create(name, figures.to_bytes())


def _leave_soon() -> None:
    """End the process once the report is out, whether or not the driver still lives to kill it."""
    timer = threading.Timer(GOODBYE_SECONDS, os._exit, (1,))
    timer.name, timer.daemon = "goodbye", True
    timer.start()
