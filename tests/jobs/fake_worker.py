"""A worker whose engine computes nothing and fails on purpose; everything around it is real.

It commits units of zeros, so it proves who commits what and when, never what is stored.
Faults go by a prompt's first token id and are read from a JSON file named in the environment, so
that a test can tell an actor process what to do.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from capture.settings import EngineFacts, UnitResult, UnitStatus, UnitTask
from jobs.worker import CaptureWorker
from store.commit import commit_unit
from store.objects.open import open_store
from store.run_format import LayerSemantics, ModelManifest, Outcome
from store.weights import OutputProjection, write_output_projection
from tests.store.sample_run import SampleShape, SampleUnit, write_unit

FAULTS = "ATTNSTORE_TEST_FAULTS"

SHAPE = SampleShape(num_layers=1, num_heads=2, num_kv_heads=1, head_size=8)
"""Of the model that `model_manifest` describes."""


class FakeWorker(CaptureWorker):
    """A `CaptureWorker` with a `FakeEngine`."""

    def _start_engine(self) -> Any:
        return FakeEngine(
            self._spec.location, self._spec.run_id, weights=self._spec.capture.output_weights
        )


class FakeEngine:
    """Runs one prompt a step, in order of admission."""

    lost_rank: int | None = None

    def __init__(self, location: Any, run_id: str, *, weights: bool = False) -> None:
        self._objects = open_store(location.url, location.options)
        self._run_id = run_id
        self._faults = json.loads(Path(os.environ[FAULTS]).read_text())
        if self._faults.get("start"):
            raise RuntimeError(self._faults["start"])
        self._queue: list[tuple[UnitTask, int]] = []
        self._place = 0
        self.facts = EngineFacts(model_manifest(run_id), bytes_per_token=64)
        if weights and not self._faults.get("weightless"):
            projection = OutputProjection(0, np.zeros((2, 8, 16), np.float32))
            write_output_projection(self._objects, projection, run_id)

    @property
    def in_flight(self) -> int:
        return len(self._queue)

    def prompts_finished(self, unit: int) -> int:
        return self._place if self._queue and self._queue[0][0].unit == unit else 0

    def admit(self, task: UnitTask) -> None:
        self._queue.append((task, 0))

    def advance(self) -> list[UnitResult]:
        task, _ = self._queue[0]
        if self._place < len(task.prompts):
            prompt = task.prompts[self._place]
            if prompt.reason is None and len(prompt.token_ids):
                self._run(int(prompt.token_ids[0]))
            self._place += 1
            return []
        self._queue.pop(0)
        self._place = 0
        return [self._commit(task)]

    @property
    def _over(self) -> bool:
        """Whether the file that ends slowness and unit errors is there."""
        gate = self._faults.get("unless_exists")
        return bool(gate) and Path(gate).exists()

    def _run(self, token: int) -> None:
        if not self._over:
            time.sleep(self._faults.get("seconds", 0.0))
        fault = self._faults.get("tokens", {}).get(str(token))
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "hang":
            time.sleep(3600)
        elif fault == "raise":
            raise RuntimeError(f"poisoned by token {token}")
        elif isinstance(fault, dict) and fault["once"]:
            marker = Path(fault["once"])
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def _commit(self, task: UnitTask) -> UnitResult:
        error = self._faults.get("unit_error")
        if error and not self._over:
            store_failed = bool(self._faults.get("store_failed"))
            return UnitResult(
                task.unit, task.attempt, UnitStatus.FAILED, error=error, store_failed=store_failed
            )
        if task.unit == self._faults.get("refused") and any(p.reason is None for p in task.prompts):
            return UnitResult(
                task.unit, task.attempt, UnitStatus.FAILED, error="403 for it", store_failed=True
            )
        if task.unit == self._faults.get("lie"):
            return UnitResult(task.unit, task.attempt, UnitStatus.COMMITTED)
        lengths = [len(p.token_ids) if p.reason is None else 0 for p in task.prompts]
        rows, at = sum(lengths), (task.unit, task.first_prompt)
        sample = SampleUnit(*at, lengths, {s: _zeros(s, rows) for s in SHAPE.sites})
        written = write_unit(
            self._objects, SHAPE, sample, task.attempt, repair=task.repair, run_id=self._run_id
        )
        outcomes = [
            Outcome.STORED if p.reason is None else Outcome.SKIPPED if p.skipped else Outcome.FAILED
            for p in task.prompts
        ]
        reasons = {str(i): p.reason for i, p in enumerate(task.prompts) if p.reason is not None}
        prompts = written.prompts.model_copy(update={"outcome": outcomes, "reasons": reasons})
        commit = written.model_copy(
            update={"prompts": prompts, "model_crc32c": self.facts.model.fingerprint}
        )
        result = commit_unit(self._objects, commit)
        return UnitResult(
            task.unit,
            task.attempt,
            UnitStatus.COMMITTED if result.won else UnitStatus.SUPERSEDED,
            stored=outcomes.count(Outcome.STORED),
            failed=outcomes.count(Outcome.FAILED),
            tokens=rows,
            bytes=rows * self._faults.get("bytes_per_token", 64),
        )


def _zeros(site: str, rows: int) -> np.ndarray:
    size = (SHAPE.num_layers, rows, SHAPE.heads(site), SHAPE.head_size)
    return np.zeros(size, np.float32)


def model_manifest(run_id: str) -> ModelManifest:
    """A model that no engine computed."""
    layer = LayerSemantics(
        layer=0, module="layers.0", num_heads=2, num_kv_heads=1, head_size=8, v_head_size=8, scale=1
    )
    return ModelManifest(
        run_id=run_id, architecture="Fake", dtype="float32", hidden_size=16, layers=[layer]
    )
