"""`attnstore run` with one fault in the real engine: a prompt of this length kills the process.

The engine, the capture and the store are real; only the moment of death is made up. The driver is
told to use `PoisonWorker` as its actor's class.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import jobs.driver
from capture.settings import UnitResult, UnitTask
from jobs.cli import app
from jobs.worker import CaptureWorker

POISON_TOKENS = "ATTNSTORE_TEST_POISON_TOKENS"


class PoisonWorker(CaptureWorker):
    """A worker that dies by SIGKILL as soon as a poisonous prompt would be in a step."""

    def _start_engine(self) -> Any:
        return _Poisoned(super()._start_engine(), int(os.environ[POISON_TOKENS]))


class _Poisoned:
    def __init__(self, engine: Any, length: int) -> None:
        self._engine, self._length = engine, length
        self._tasks: dict[int, UnitTask] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def admit(self, task: UnitTask) -> None:
        self._tasks[task.unit] = task
        self._engine.admit(task)

    def advance(self) -> list[UnitResult]:
        for task in self._tasks.values():
            place = next((i for i, p in enumerate(task.prompts) if self._is_poison(p)), None)
            if place is None:
                continue
            reached = self._engine.prompts_finished(task.unit)
            if not task.batch_prompts or reached == place:
                os.kill(os.getpid(), signal.SIGKILL)
        results = self._engine.advance()
        for result in results:
            self._tasks.pop(result.unit, None)
        return list(results)

    def _is_poison(self, prompt: Any) -> bool:
        return prompt.reason is None and len(prompt.token_ids) == self._length


if __name__ == "__main__":
    real_run = jobs.driver.run

    def run_with_poison(config: Any, options: Any, *rest: Any) -> Any:
        return real_run(config, replace(options, worker=PoisonWorker), *rest)

    jobs.driver.run = run_with_poison  # type: ignore[assignment]
    app()
