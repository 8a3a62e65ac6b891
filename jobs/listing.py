"""A run's prompts one by one, with what became of each: a stream over plan and commits.

Holds one plan file and a few hundred commits at a time, so that it works on runs of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jobs.prepare import read_manifest
from store.commit import committed_units, read_commit, require_run
from store.errors import RunError
from store.objects.protocol import ObjectStore
from store.plan import read_prompt_range, read_segments, read_units
from store.run_format import Outcome
from store.unit_states import DAMAGED, PENDING

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
    run_id = read_manifest(objects).run_id
    names = committed_units(objects)
    for segment in read_segments(objects):
        units = read_units(objects, segment)
        for unit, first, count in zip(
            units["unit"].to_pylist(),
            units["first_prompt"].to_pylist(),
            units["num_prompts"].to_pylist(),
            strict=True,
        ):
            found = _became(objects, names.get(unit), run_id, range(first, first + count))
            if only_failed and all(status in (PENDING, Outcome.STORED) for status, _ in found):
                continue
            table = read_prompt_range(objects, segment, first, count, _COLUMNS)
            ids, lengths = (table[name].to_pylist() for name in _COLUMNS)
            for place, (status, reason) in enumerate(found):
                if only_failed and status in (PENDING, Outcome.STORED):
                    continue
                yield PromptRow(
                    prompt_id=ids[place],
                    num_tokens=lengths[place],
                    unit=unit,
                    status=status,
                    reason=reason,
                )


def _became(
    objects: ObjectStore, name: str | None, run_id: str, prompts: range
) -> list[tuple[str, str | None]]:
    """Return (status, reason) of a unit's prompts, which its commit of this name tells."""
    if name is None:
        return [(PENDING, None)] * len(prompts)
    try:
        commit = read_commit(objects, name)
        require_run(commit, name, run_id)
    except RunError as error:
        return [(DAMAGED, str(error))] * len(prompts)
    outcomes, reasons = commit.prompts.outcome, commit.prompts.reasons
    if (commit.first_prompt, len(outcomes)) != (prompts.start, len(prompts)):
        why = f"{name} is of other prompts than the plan's unit; run `attnstore verify`"
        return [(DAMAGED, why)] * len(prompts)
    return [(one.value, reasons.get(str(place))) for place, one in enumerate(outcomes)]
