"""A run's prompts one by one, with what became of each: a stream over plan and commits.

Holds one plan file and a few hundred commits at a time, so that it works on runs of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jobs.prepare import read_manifest
from store.commit import committed_units, read_commit
from store.objects.protocol import ObjectStore
from store.plan import read_prompt_range, read_segments, read_units
from store.run_format import Outcome

PENDING = "pending"
_COLUMNS = ("prompt_id", "num_tokens")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt and what became of it."""

    prompt_id: str
    num_tokens: int
    unit: int
    status: str
    reason: str | None

    def as_json(self) -> dict[str, Any]:
        """Return the row as `attnstore ls --json` prints it."""
        return {
            "prompt_id": self.prompt_id,
            "num_tokens": self.num_tokens,
            "unit": self.unit,
            "status": self.status,
            "reason": self.reason,
        }


def prompt_rows(objects: ObjectStore, *, only_failed: bool = False) -> Iterator[PromptRow]:
    """Yield a run's prompts in plan order; with `only_failed` those that failed or were skipped."""
    read_manifest(objects)
    names = committed_units(objects)
    for segment in read_segments(objects):
        units = read_units(objects, segment)
        for unit, first, count in zip(
            units["unit"].to_pylist(),
            units["first_prompt"].to_pylist(),
            units["num_prompts"].to_pylist(),
            strict=True,
        ):
            commit = read_commit(objects, names[unit]) if unit in names else None
            outcomes = commit.prompts.outcome if commit else [None] * count
            if only_failed and all(o is None or o is Outcome.STORED for o in outcomes):
                continue
            table = read_prompt_range(objects, segment, first, count, _COLUMNS)
            ids, lengths = (table[name].to_pylist() for name in _COLUMNS)
            for place, outcome in enumerate(outcomes):
                if only_failed and outcome in (None, Outcome.STORED):
                    continue
                yield PromptRow(
                    prompt_id=ids[place],
                    num_tokens=lengths[place],
                    unit=unit,
                    status=PENDING if outcome is None else outcome.value,
                    reason=commit.prompts.reasons.get(str(place)) if commit else None,
                )
