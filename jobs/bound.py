"""Which stage bounds a run: engines, copying, encoding, the store, or want of work; what to change.

Pure arithmetic over seconds by stage, as units report them: what the engines computed, how long
they waited for storing (no free slabs, or nothing left to do until units were durable), how long
they had no unit, and what the storing threads spent on each of their stages. Where the engines
computed nearly always they bound the run; where they waited, the storing stage that took longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEARLY_ALWAYS = 0.8
ENGINE, WAIT, IDLE = "engine", "wait", "idle"
ADVICE = {
    ENGINE: "more workers, or larger steps (engine.max_num_batched_tokens)",
    IDLE: "more units in flight (engine.units_in_flight), or larger units (capture.unit_tokens)",
    "copy": "fewer sites, layers or heads; more cores for engine.writer_threads",
    "encode": "codec raw or fast; more cores for engine.writer_threads",
    "put": "a faster store, more engine.writer_threads, workers on more hosts, or codec small",
    "commit": "a faster store, or larger units (capture.unit_tokens)",
}
_STORING = ("copy", "encode", "put", "commit")
_SHOWN = {ENGINE: "computing", WAIT: "waiting for storing", IDLE: "without a unit"}


@dataclass(frozen=True, slots=True)
class Bound:
    """The stage that a run waited for, and the shares (0 to 1) that tell it."""

    stage: str
    engines: dict[str, float]
    """Of the engines' time: `engine` computing, `wait` for storing, `idle` without a unit."""
    storing: dict[str, float]
    """Of the storing threads' time: each of their stages."""

    @property
    def advice(self) -> str:
        return ADVICE[self.stage]

    def as_json(self) -> dict[str, Any]:
        """Return it as `attnstore run --json` and `status --json` print it."""
        engines, storing = (
            {name: round(share, 3) for name, share in shares.items()}
            for shares in (self.engines, self.storing)
        )
        return {
            "stage": self.stage,
            "engines": engines,
            "storing": storing,
            "advice": self.advice,
        }

    def sentence(self) -> str:
        """Return it as `attnstore run` and `status` print it."""
        engines = ", ".join(f"{_SHOWN[name]} {share:.0%}" for name, share in self.engines.items())
        storing = ", ".join(f"{name} {share:.0%}" for name, share in self.storing.items())
        told = f"bound by: {self.stage} (engines: {engines}"
        return f"{told}{f'; storing: {storing}' if storing else ''}); faster with {self.advice}"


def find_bound(stage_seconds: Mapping[str, float]) -> Bound | None:
    """Return what bounded a run, or None where nothing was measured.

    `stage_seconds`: seconds by stage, summed over units, and over ranks and threads where several
    work at a time.
    """
    spent = {name: stage_seconds.get(name, 0.0) for name in (ENGINE, WAIT, IDLE)}
    total = sum(spent.values())
    if total <= 0:
        return None
    engines = {name: seconds / total for name, seconds in spent.items()}
    storing = {name: stage_seconds[name] for name in _STORING if stage_seconds.get(name)}
    busiest = max(storing, key=lambda name: storing[name], default=ENGINE)
    all_storing = sum(storing.values())
    if engines[ENGINE] >= NEARLY_ALWAYS:
        stage = ENGINE
    else:
        stage = IDLE if engines[IDLE] > engines[WAIT] else busiest
    return Bound(stage, engines, {name: took / all_storing for name, took in storing.items()})
