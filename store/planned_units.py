"""Which prompts each unit of a plan has, and whether a commit covers them. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store.committed_units import CommittedUnits
from store.errors import DamagedObject
from store.generated import GENERATED
from store.plan import UNIT_FIELDS, missing_segment
from store.run_format import Commit, Outcome, PlanManifest

_NO_UNITS = UNIT_FIELDS.empty_table()
_SLICE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?")


@dataclass(frozen=True, slots=True)
class FileTokens:
    """How many tokens each prompt of one file of the plan has; `first_prompt` counts run-wide."""

    first_prompt: int
    num_tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PlannedUnits:
    """Which prompts each planned unit has, ascending by unit."""

    unit: NDArray[np.int64]
    first_prompt: NDArray[np.int64]
    num_prompts: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    """Of those prompts that are to run."""
    tokens: Sequence[FileTokens] = ()
    """Of the files that were read, in plan order."""
    kept: slice | None = None
    """See `kept_positions`."""
    unread: Sequence[range] = ()
    """Units that are planned in files which could not be read."""
    segments: Sequence[PlanManifest] = ()

    @classmethod
    def of(
        cls,
        tables: Sequence[pa.Table],
        tokens: Sequence[FileTokens] = (),
        kept: slice | None = None,
        unread: Sequence[range] = (),
        segments: Sequence[PlanManifest] = (),
    ) -> PlannedUnits:
        """Return the units of the plan's tables, in plan order."""
        names = UNIT_FIELDS.names
        whole = pa.concat_tables([table.select(names) for table in tables] or [_NO_UNITS])
        columns = {name: np.asarray(whole[name].to_numpy(), np.int64) for name in names}
        return cls(**columns, tokens=tokens, kept=kept, unread=unread, segments=segments)

    def contradictions(
        self, commit: Commit, generated: Mapping[int, int] | None = None
    ) -> Iterator[str]:
        """Yield where a commit does not cover the prompts of its unit.

        `generated` says how many tokens each place's prompt was given, where that was read. Where
        the prompts were not, rows are held against the positions that the run keeps and against the
        tokens of the whole unit.
        """
        if problem := plan_contradiction(commit, self.segments):
            yield problem
        place = int(np.searchsorted(self.unit, commit.unit))
        if place == len(self.unit) or self.unit[place] != commit.unit:
            if not any(commit.unit in units for units in self.unread):
                yield "no plan segment has this unit"
            return
        planned = int(self.first_prompt[place]), int(self.num_prompts[place])
        stated = commit.first_prompt, len(commit.prompts.outcome)
        if planned != stated:
            yield (
                f"covers {stated[1]} prompts from {stated[0]}, the plan's unit has {planned[1]} "
                f"from {planned[0]}"
            )
            return
        known = list(self._tokens_of(*planned))
        if len(known) < planned[1] and self.kept is not None:
            yield from unread_contradictions(
                commit, self.kept, int(self.num_tokens[place]), {at for at, _ in known}
            )
        for at, num_tokens in known:
            said = None if generated is None else generated.get(at, 0)
            problem = row_contradiction(commit, at, num_tokens, said, self.kept)
            if problem:
                yield problem

    def _tokens_of(self, first_prompt: int, num_prompts: int) -> Iterator[tuple[int, int]]:
        """Yield place and tokens of each of a unit's prompts whose file was read."""
        start = bisect_right(self.tokens, first_prompt, key=lambda file: file.first_prompt)
        for file in self.tokens[max(0, start - 1) :]:
            offset = file.first_prompt - first_prompt
            if offset >= num_prompts:
                return
            low = max(0, -offset)
            for at, tokens in enumerate(file.num_tokens[low : num_prompts - offset].tolist(), low):
                yield offset + at, tokens


def require_planned(committed: CommittedUnits, segments: Sequence[PlanManifest]) -> None:
    """Raise `DamagedObject` where units are committed that these segments, all of them, lack.

    They are to be listed after the commits: others may have come with units of theirs until then.
    """
    if committed.last >= sum(segment.num_units for segment in segments):
        missing = missing_segment(segments, f"unit {committed.last} is committed")
        raise DamagedObject(f"{missing}: restore it from a copy of the run")


def plan_contradiction(commit: Commit, segments: Sequence[PlanManifest]) -> str | None:
    """Return how a commit is of another plan than its unit's segment is now, or None."""
    if commit.plan_hash is None:
        return None
    place = bisect_right(segments, commit.unit, key=lambda one: one.first_unit) - 1
    if place < 0 or commit.unit >= segments[place].first_unit + segments[place].num_units:
        return None
    segment = segments[place]
    if segment.plan_hash == commit.plan_hash:
        return None
    return (
        f"was captured from a plan of hash {commit.plan_hash[:12]}, plan segment "
        f"{segment.segment} has the hash {segment.plan_hash[:12]}: its rows are of other prompts"
    )


def kept_positions(config: Mapping[str, Any]) -> slice | None:
    """Return which positions of each prompt a run's config keeps; None where it does not say."""
    capture = config.get("capture")
    stated = capture.get("positions") if isinstance(capture, Mapping) else None
    return positions_slice(stated) if isinstance(stated, str) else None


def positions_slice(stated: str) -> slice | None:
    """Return what `all`, `last` or a slice such as `0:16` keeps of each prompt; else None."""
    if stated in ("all", "last"):
        return slice(None if stated == "all" else -1, None)
    match = _SLICE.fullmatch(stated)
    if match is None:
        return None
    start, stop = (None if part is None else int(part) for part in match.groups())
    return slice(start, stop)


def unread_contradictions(
    commit: Commit, kept: slice, num_tokens: int, known: Container[int] = ()
) -> Iterator[str]:
    """Yield how rows contradict what is known of a unit without its prompts, but those in `known`.

    That is the positions that each prompt keeps, and how many tokens all of them have together.
    """
    prompts = commit.prompts
    columns = prompts.outcome, prompts.first_position, prompts.num_rows
    if len({len(column) for column in columns}) != 1:
        return
    start = kept.start or 0
    may_go_on = any(one.name == GENERATED for one in commit.objects)
    reach = 0
    for place, (outcome, first, rows) in enumerate(zip(*columns, strict=True)):
        if outcome is not Outcome.STORED:
            continue
        reach += first + rows
        wrong = (
            first != start
            if start >= 0
            else bool(first)
            and kept.stop is None
            and (rows < -start or (rows > -start and not may_go_on))
        )
        if wrong and place not in known:
            yield (
                f"prompt {place} has {rows} rows from position {first}, which are not those that "
                "the run keeps"
            )
    whole = kept.stop is None and all(one is Outcome.STORED for one in prompts.outcome)
    if not may_go_on and (reach > num_tokens or (whole and reach < num_tokens)):
        yield f"its prompts' rows end at {reach} tokens in all, the plan's unit has {num_tokens}"


def row_contradiction(
    commit: Commit,
    place: int,
    num_tokens: int,
    generated: int | None = None,
    kept: slice | None = None,
) -> str | None:
    """Return how the rows of a stored prompt contradict its planned tokens, or None.

    They are of the positions that the run keeps. Where it does not say which (`kept` None), they
    lie within the prompt, and those from position 0 cover it whole. Generation adds as many as
    tokens were `generated` but the last; None: that is not known, and it may have added some.
    """
    prompts = commit.prompts
    if len({len(prompts.outcome), len(prompts.num_rows), len(prompts.first_position)}) != 1:
        return None
    if prompts.outcome[place] is not Outcome.STORED:
        return None
    first, rows = prompts.first_position[place], prompts.num_rows[place]
    due = num_tokens + max(0, (generated or 0) - 1)
    if kept is None:
        kept = slice(first, first + rows) if first else slice(None)
    start, stop, _ = kept.indices(num_tokens)
    end = first + rows
    goes_on = stop == num_tokens < end and (
        end <= due or (generated is None and any(one.name == GENERATED for one in commit.objects))
    )
    if first != start or (end != stop and not goes_on):
        more = f" and {generated} generated ones" if generated else ""
        return (
            f"prompt {place} has {rows} rows from position {first}, the plan gives it "
            f"{num_tokens} tokens{more}"
        )
    return None
