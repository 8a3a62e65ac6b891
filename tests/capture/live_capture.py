"""Captures on a real engine, in a process of its own, into a run that `open_run` reads.

vLLM wants one engine after another in one process at most, so tests describe what they want
(`LiveCapture`), `capture_live` runs it to its end in a process of its own, and many tests read the
result.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.capture.nursery import run_copy

RUN_ID = "ab" * 8


@dataclass(frozen=True)
class LiveCapture:
    """One engine and the units it captures. A prompt is its token ids; one with a reason fails."""

    out: str
    model: str
    units: list[list[list[int]]]
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of `EngineSettings`."""
    capture: dict[str, Any] = field(default_factory=dict)
    """Fields of `CaptureSettings`, as JSON."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Prompt number over all units -> why it must not run."""
    alone: bool = False
    """One unit after the other, each with nothing else in the engine."""
    self_check: bool = False
    """Run the self-check first, as it is and with a scale that is not the model's."""
    record_bits: bool = False
    """Record what the attention modules see by torch hooks, beside the capture (one rank)."""

    def first_prompt(self, unit: int) -> int:
        return sum(len(prompts) for prompts in self.units[:unit])

    def ids(self, prompt: int) -> list[int]:
        return [ids for unit in self.units for ids in unit][prompt]


@dataclass(frozen=True)
class Captured:
    """What a live capture left behind."""

    wanted: LiveCapture
    results: list[dict[str, Any]]
    staged_rows: list[float]
    """Rows that each rank staged, recomputed ones included."""
    checks: tuple[Any, ...] = ()
    """The self-check's figures, and the message of the one that had to fail."""
    error: str | None = None
    """Why the engine could not capture, where it could not."""

    @property
    def run(self) -> Any:
        from store.run import open_run

        return open_run(self.wanted.out)

    def bits(self, unit: int) -> dict[str, np.ndarray]:
        """Return what the hooks saw while `unit` ran alone: "layer/site" -> [rows, features]."""
        with np.load(Path(self.wanted.out) / f"bits-{unit}.npz") as arrays:
            return dict(arrays)


def capture_live(
    wanted: Sequence[LiveCapture], seconds: float = 280.0, *, keep_going: bool = False
) -> list[Captured]:
    """Run captures one after another in one process; raise with its output if it fails.

    `keep_going` leaves the error of a capture in its `Captured` instead.
    """
    first = Path(wanted[0].out)
    first.parent.mkdir(parents=True, exist_ok=True)
    spec = first.with_suffix(".spec.json")
    spec.write_text(json.dumps([asdict(item) for item in wanted]))
    code, output = run_copy(spec, seconds)
    if code:
        raise AssertionError(f"the capture failed ({code}):\n{output[-12_000:]}")
    captured = [kept_capture(item) for item in wanted]
    for item in captured:
        if item.error is not None and not keep_going:
            raise AssertionError(f"the capture failed:\n{item.error[-8000:]}")
    return captured


def kept_capture(item: LiveCapture) -> Captured:
    """Return what an earlier capture of this left at its place."""
    body = json.loads((Path(item.out) / "captured.json").read_text())
    return Captured(
        item, body["results"], body["staged_rows"], tuple(body["checks"]), body["error"]
    )


def run_capture(wanted: LiveCapture) -> None:
    """Start the engine, capture every unit, and leave a complete run at `wanted.out`."""
    from capture.engine import CaptureEngine
    from capture.settings import CaptureSettings, EngineSettings, StoreLocation

    defaults = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}
    settings = EngineSettings(model=wanted.model, **{**defaults, **wanted.engine})
    budget = {"host_bytes": 256 << 20, "slot_bytes": 4 << 20}
    plain = {**CaptureSettings(**budget).to_json(), **wanted.capture}
    Path(wanted.out).mkdir(parents=True)
    engine = CaptureEngine.start(
        settings, CaptureSettings.from_json(plain), StoreLocation(wanted.out), RUN_ID
    )
    try:
        _write_manifests(wanted, engine.facts.model)
        checks = _self_checks(engine, wanted) if wanted.self_check else []
        recorder = _BitRecorder(engine) if wanted.record_bits else None
        results = []
        for number, task in enumerate(_tasks(wanted)):
            engine.admit(task)
            while wanted.alone and engine.in_flight:
                results += engine.advance()
            if recorder is not None:
                recorder.save(Path(wanted.out) / f"bits-{number}.npz")
        while engine.in_flight:
            results += engine.advance()
        staged = [timings["rows"] for timings in engine._engine.call("capture_timings")]
    finally:
        engine.shutdown()
    results = [asdict(result) for result in results]
    body = {"results": results, "staged_rows": staged, "checks": checks, "error": None}
    _leave(wanted, body)


def _self_checks(engine: Any, wanted: LiveCapture) -> list[Any]:
    from capture.errors import SelfCheckFailed
    from capture.self_check import self_check
    from capture.settings import StoreLocation

    class WrongScale:
        """The engine, but with layer 1 said to scale twice as much as it does."""

        def __init__(self) -> None:
            model = engine.facts.model
            layers = [
                layer.model_copy(update={"scale": 2 * layer.scale}) if layer.layer == 1 else layer
                for layer in model.layers
            ]
            self.facts = replace(engine.facts, model=model.model_copy(update={"layers": layers}))

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    prompts = [np.asarray(ids, np.int32) for ids in wanted.units[0]]
    location = StoreLocation(wanted.out)
    figures = self_check(engine, prompts, location, wanted.model)
    try:
        self_check(WrongScale(), prompts, location, wanted.model)
    except SelfCheckFailed as error:
        engine.reopen(location)
        return [figures.to_json(), str(error)]
    return [figures.to_json(), "it passed"]


def _leave(wanted: LiveCapture, body: dict[str, Any]) -> None:
    Path(wanted.out).mkdir(parents=True, exist_ok=True)
    (Path(wanted.out) / "captured.json").write_text(json.dumps(body))


def _tasks(wanted: LiveCapture) -> list[Any]:
    from capture.settings import PromptTask, UnitTask

    tasks = []
    for unit, prompts in enumerate(wanted.units):
        first = wanted.first_prompt(unit)
        tasks.append(
            UnitTask(
                unit,
                f"a{unit}",
                first,
                tuple(
                    PromptTask(np.asarray(ids, np.int32), wanted.reasons.get(str(first + place)))
                    for place, ids in enumerate(prompts)
                ),
            )
        )
    return tasks


def _write_manifests(wanted: LiveCapture, model: Any) -> None:
    import pyarrow as pa

    from store import keys
    from store.objects.open import open_store
    from store.plan import PROMPT_FIELDS, UNIT_FIELDS
    from store.plan_writer import write_segment
    from store.run_format import RunManifest

    objects = open_store(wanted.out)
    config = {"model": {"path": wanted.model}, "capture": wanted.capture}
    run = RunManifest(
        run_id=RUN_ID, created="2026-01-01T00:00:00Z", frozen={}, config=config, versions={}
    )
    objects.create(keys.RUN, run.to_bytes())
    objects.create(keys.MODEL, model.to_bytes())
    flat = [ids for unit in wanted.units for ids in unit]
    prompts = pa.table(
        {
            "prompt_id": [f"p{number}" for number in range(len(flat))],
            "text": [f"prompt {number}" for number in range(len(flat))],
            "token_ids": flat,
            "token_strings": [[f"<{token}>" for token in ids] for ids in flat],
            "num_tokens": [len(ids) for ids in flat],
            "plan_reason": [wanted.reasons.get(str(number)) for number in range(len(flat))],
        },
        schema=PROMPT_FIELDS,
    )
    units = pa.table(
        {
            "unit": list(range(len(wanted.units))),
            "first_prompt": [wanted.first_prompt(unit) for unit in range(len(wanted.units))],
            "num_prompts": [len(prompts) for prompts in wanted.units],
            "num_tokens": [sum(map(len, prompts)) for prompts in wanted.units],
        },
        schema=UNIT_FIELDS,
    )
    write_segment(objects, run_id=RUN_ID, segment=0, prompts=prompts, units=units)


class _BitRecorder:
    """Plain torch hooks on vLLM's attention modules: a witness that shares nothing with capture."""

    def __init__(self, engine: Any) -> None:
        self.seen: dict[str, list[np.ndarray]] = {}
        engine._engine._engine.collective_rpc(self._install)

    def _install(self, worker: Any) -> None:
        from vllm.model_executor.layers.attention import Attention

        modules = worker.model_runner.get_model().named_modules()
        layers = [module for _, module in modules if isinstance(module, Attention)]
        for number, module in enumerate(layers):
            module.register_forward_pre_hook(self._before(number))
            module.register_forward_hook(self._after(number))

    def _before(self, layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            for site, tensor in zip(("rot_q", "rot_k", "v"), args[:3], strict=True):
                self._note(f"{layer}/{site}", tensor)

        return hook

    def _after(self, layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            self._note(f"{layer}/z", output)

        return hook

    def _note(self, name: str, tensor: Any) -> None:
        import torch

        bits = tensor.detach().clone().contiguous().view(torch.uint8)
        self.seen.setdefault(name, []).append(bits.reshape(tensor.shape[0], -1).numpy())

    def save(self, path: Path) -> None:
        np.savez(path, **{name: np.concatenate(rows) for name, rows in self.seen.items()})
        self.seen.clear()


def capture_all(spec: Path) -> None:
    """Run the captures that a file lists, one engine after another, in this process."""
    wanted = [LiveCapture(**item) for item in json.loads(spec.read_text())]
    for number, item in enumerate(wanted):
        if number:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        try:
            run_capture(item)
        except Exception:  # noqa: BLE001
            # Policy: one family's failure is told with its result and does not stop the others.
            told = traceback.format_exc()
            _leave(item, {"results": [], "staged_rows": [], "checks": [], "error": told})
