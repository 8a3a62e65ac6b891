"""Which stage bounds a run: the engines, copying, encoding, the store; and what to change.

Pure arithmetic over the seconds that ranks report for each stage of storing. A stage is busy to the
share of its threads' time that it took. Where the threads were busy nearly always the busiest stage
bounds the run; otherwise the engines do, since storing waited for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEARLY_ALWAYS = 0.8
ENGINE = "engine"
_ADVICE = {
    ENGINE: "more workers, or larger steps (engine.max_num_batched_tokens)",
    "copy": "fewer sites or layers; more cores for engine.writer_threads",
    "encode": "codec raw or fast; more cores for engine.writer_threads",
    "put": "a faster store, workers on more hosts, or codec small",
    "sync": "a faster disk, or larger units (capture.unit_tokens)",
}


@dataclass(frozen=True, slots=True)
class Bound:
    """The stage that a run waited for, and how busy each stage of storing was (0 to 1)."""

    stage: str
    busy: dict[str, float]

    @property
    def advice(self) -> str:
        return _ADVICE.get(self.stage, "")

    def as_json(self) -> dict[str, Any]:
        """Return it as `attnstore run --json` prints it at the end."""
        busy = {name: round(share, 3) for name, share in self.busy.items()}
        return {"stage": self.stage, "busy": busy, "advice": self.advice}

    def sentence(self) -> str:
        """Return it as `attnstore run` prints it at the end."""
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.busy.items())
        return f"bound by: {self.stage} (busy: {shares}); faster with {self.advice}"


def find_bound(
    stage_seconds: Mapping[str, float], worker_seconds: float, threads_per_worker: int
) -> Bound | None:
    """Return what bounded a run, or None where nothing was measured.

    `stage_seconds`: seconds by stage, summed over ranks and their threads; `worker_seconds`: the
    time that workers held units, summed over workers; `threads_per_worker`: storing threads of all
    ranks of one worker.
    """
    available = worker_seconds * threads_per_worker
    known = {name: stage_seconds[name] for name in _ADVICE if stage_seconds.get(name)}
    if available <= 0 or not known:
        return None
    busy = {name: min(1.0, seconds / available) for name, seconds in known.items()}
    total = min(1.0, sum(known.values()) / available)
    largest = max(busy, key=lambda name: busy[name])
    return Bound(largest if total >= NEARLY_ALWAYS else ENGINE, busy)
