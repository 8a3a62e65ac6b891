"""Which prompts a run has, which unit holds each, and what became of it.

Knows the plan's tables and the commits; never knows arrays or chunks. Opening costs the newest
snapshot and a listing of what came after it; a commit is read when a prompt of its unit is asked
for. An index never changes: what is committed later is in the index that `refreshed` returns, so
whoever holds one sees one state of the run, whatever other threads do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store import keys
from store.ahead import Begin, Begun, asked_at_once
from store.commit_cache import CommitCache, RowProblems, UnitSummary, has_generated
from store.committed_units import CommittedUnits
from store.errors import DamagedObject, FormatError, PromptNotStored
from store.generated import Continuation
from store.objects.protocol import ObjectStore
from store.plan import FIRST_MANIFEST, read_segments
from store.plan_tables import PlanTables, PromptTokens
from store.planned_units import plan_contradiction, row_contradiction
from store.prompt_names import Prompt, PromptNames
from store.run_format import Commit, ModelManifest, Outcome, PlanManifest
from store.sealed_json import MAX_JSON_BYTES
from store.snapshot import find_committed
from store.unit_states import UnitStates

ROWS_AHEAD = 4096
"""A prompt of more rows is held against the plan before anything of its size is made: what a commit
says of it may be anything. Others are read while the plan's table is on its way."""


class Threads(Protocol):
    """What makes calls at the same time: the run's `ArrayReader`."""

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Return `function` of each item, in order."""

    def begin(self, call: Callable[[], Any]) -> Begun[Any]:
        """Begin a call whose answer is asked for later."""


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """Where a prompt is: its row in the prompts table, its unit, its place in that unit."""

    row: int
    unit: int
    place: int


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt whose rows are in the run, with the commit that holds them."""

    place: PromptPlace
    commit: Commit
    first_row: int
    positions: NDArray[np.int64]


def looking(
    objects: ObjectStore, *documents: str
) -> AbstractContextManager[tuple[ObjectStore, Begin]]:
    """Ask at once for these documents and for what tells a run's plan segments and commits."""
    gets = [(name, MAX_JSON_BYTES) for name in (*documents, FIRST_MANIFEST)]
    if getattr(objects, "lists_whole_folders", False):
        lists = [(folder, "") for folder in (keys.COMMITS, keys.PLAN, keys.SNAPSHOTS)]
    else:
        lists = [(keys.COMMITS, ""), ("", keys.BEFORE_PLAN)]
    return asked_at_once(objects, gets=gets, lists=lists)


class RunIndex:
    """The prompts of one run, by id or by row, as they were when it was looked at."""

    def __init__(
        self,
        objects: ObjectStore,
        threads: Threads,
        run_id: str,
        kept: slice | None = None,
        due: frozenset[str] = frozenset(),
        *,
        plan: PlanTables | None = None,
        committed: CommittedUnits | None = None,
        commits: CommitCache | None = None,
    ) -> None:
        """`kept`: the positions that the run keeps, as `store.planned_units` tells them; `due`: the
        sites that every unit of it holds, as `store.due_sites` tells them.

        Without the others it is empty, and `looked` returns the first that is not.
        """
        self._objects = objects
        self._threads = threads
        self._run_id = run_id
        self._kept = kept
        self._plan = plan or PlanTables(objects, [], threads.begin)
        self.names = PromptNames(self._plan)
        """What a prompt's id or number means in this state."""
        self._committed = committed or CommittedUnits.none()
        self._commits = commits or CommitCache(objects, threads.begin, run_id, due)
        self.states = UnitStates(objects, run_id, self._plan, self._committed, self._map_all)
        """What became of the prompts in this state."""
        self._lock = threading.Lock()
        self._prompts: pa.Table | None = None

    def refreshed(self) -> RunIndex:
        """Look again for plan segments and commits that were added since."""
        with looking(self._objects) as (first, begin):
            return self.looked(first, begin)

    def looked(self, first: ObjectStore, begin: Begin) -> RunIndex:
        """Look for plan segments and commits through `first`, as `looking` gives it."""
        segments = self._own(read_segments(first))
        committed = find_committed(first, self._run_id, begin)
        self._commits.look_for_model(first)
        planned = segments[-1].first_unit + segments[-1].num_units if segments else 0
        if committed.last >= planned:
            # A segment may have come, and a unit of it, after segments were listed: look again.
            segments = self._own(read_segments(self._objects))
            if not segments:
                raise DamagedObject(f"{FIRST_MANIFEST} is missing, though units are committed")
        plan = self._plan
        if segments != plan.segments:
            plan = PlanTables(self._objects, segments, self._threads.begin)
        commits = self._commits
        if replaced := committed.replaced_since(self._committed):
            # What is kept goes by names, and a name has another commit now.
            commits = commits.emptied()
            read = list(self._committed.read.items())
            committed.read = {one: row for one, row in read if one[0] not in replaced}
        else:
            committed.read = self._committed.read
        return RunIndex(
            self._objects,
            self._threads,
            self._run_id,
            self._kept,
            plan=plan,
            committed=committed,
            commits=commits,
        )

    def model(self) -> ModelManifest | None:
        """Return what `model.json` says, or None while no engine has started."""
        return self._commits.model()

    @property
    def num_prompts(self) -> int:
        return self._plan.num_prompts

    @property
    def num_units(self) -> int:
        return self._plan.num_units

    @property
    def committed(self) -> list[int]:
        """The committed units, ascending."""
        return [int(unit) for unit in self._committed.units()]

    def table(self) -> pa.Table:
        """Return the prompts table without its token columns, loaded when first asked for."""
        return self._plan.prompts()

    def tokens(self, row: int, *, planned: bool = False) -> PromptTokens:
        """Return a prompt's token ids and strings, those generated after it included.

        With `planned` without them; then no commit is read.
        """
        ids, strings = self._plan.tokens(row)
        said = None if planned else self.continuation(row)
        if said is None:
            return ids, strings
        longer = np.concatenate([ids, np.asarray(said.token_ids, ids.dtype)])
        return longer, [*strings, *said.token_strings]

    def continuation(self, row: int) -> Continuation | None:
        """Return what was generated after a prompt; None where nothing was, or not yet."""
        (unit,), (place,) = self._plan.units_of(np.asarray([row], np.int64))
        commit = self.commit(int(unit))
        return None if commit is None else self._commits.continuations(commit).get(int(place))

    def locate(self, prompt: Prompt) -> PromptPlace:
        """Return the place of a prompt given by its id or its row in the prompts table.

        Raises `PromptNotFound`, naming ids that are spelled nearly so.
        """
        row = self.names.row_of(prompt)
        (unit,), (place,) = self._plan.units_of(np.asarray([row], np.int64))
        return PromptPlace(row, int(unit), int(place))

    def units_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the unit of each prompt row."""
        return self._plan.units_of(rows)[0]

    def begin(self, prompt: Prompt) -> None:
        """Begin to read what the first read of a prompt needs: the tables and its unit's commit.

        Which unit it is may be told before the tables are there: then its commit does not wait.
        """
        if not self._plan.begin():
            return
        unit = None
        if isinstance(prompt, str):
            unit = self._plan.only_unit
        elif self._plan.only_unit is None:
            unit = self._committed.unit_of(self.names.row_of_number(prompt))
        name = None if unit is None else self._committed.key(unit)
        if name is not None:
            self._commits.begin(name)

    def stored(self, prompt: Prompt) -> StoredPrompt:
        """Return a prompt's rows.

        Raises `PromptNotFound`, or `PromptNotStored` with the prompt's state and its reason.
        """
        found = self.found(prompt)
        self.check(found)
        return found

    def found(self, prompt: Prompt) -> StoredPrompt:
        """Return what `stored` does, with `check` left to do before anything read is given out.

        A prompt given by its row does not wait for the prompts table, which may be on its way.
        """
        self.begin(prompt)
        place = self.locate(prompt)
        commit = self.commit(place.unit)
        if commit is None:
            done, planned = len(self._committed), self.num_units
            raise PromptNotStored(
                f"prompt {self.names.id_of(place.row)!r} is pending: its unit {place.unit} is not "
                f"committed ({done} of {planned} units are); run `attnstore run` again, then call "
                "refresh()"
            )
        outcomes = commit.prompts
        outcome = outcomes.outcome[place.place]
        if outcome is not Outcome.STORED:
            reason = outcomes.reasons.get(str(place.place), "no reason was recorded")
            raise PromptNotStored(
                f"prompt {self.names.id_of(place.row)!r} {_is(outcome)}: {reason}"
            )
        if outcomes.num_rows[place.place] > ROWS_AHEAD:
            self._check_rows(place, commit)
        return StoredPrompt(
            place, commit, outcomes.first_row[place.place], _positions(commit, place.place)
        )

    def check(self, found: StoredPrompt) -> None:
        """Check a prompt's rows against the plan's tokens. Raises `FormatError`."""
        self._check_rows(found.place, found.commit)

    def _check_rows(self, place: PromptPlace, commit: Commit) -> None:
        if problem := self.row_problems(commit).get(place.place):
            raise FormatError(
                f"the commit of unit {place.unit}: {problem} ({self.names.id_of(place.row)!r}); "
                "run `attnstore verify`"
            )

    def row_problems(self, commit: Commit) -> RowProblems:
        """Return how the rows of a commit's prompts contradict the plan's tokens, by place.

        Worked out once for as long as the commit is kept, since streams ask it of every block.
        """
        return self._commits.problems(commit, partial(self._row_problems, commit))

    def _row_problems(self, commit: Commit) -> RowProblems:
        may_be_longer = has_generated(commit)
        first, count = commit.first_prompt, len(commit.prompts.outcome)
        planned = self.table()["num_tokens"].slice(first, count).to_pylist()
        found: RowProblems = {}
        for place, tokens in enumerate(planned):
            problem = row_contradiction(commit, place, tokens, kept=self._kept)
            if problem is None and may_be_longer:
                said = self._commits.continuations(commit)
                generated = len(said[place].token_ids) if place in said else 0
                problem = row_contradiction(commit, place, tokens, generated, self._kept)
            if problem:
                found[place] = problem
        return found

    def commit(self, unit: int) -> Commit | None:
        """Return the commit that counts for a unit, or None while there is none.

        Raises as `CommitCache.get` does, and `FormatError` where it is of another plan or prompts.
        """
        name = self._committed.key(unit)
        if name is None:
            return None
        commit = self._commits.get(name)
        covered = commit.first_prompt, len(commit.prompts.outcome)
        problem = plan_contradiction(commit, self._plan.segments)
        if problem := problem or self._plan.span_problem(unit, *covered):
            raise FormatError(f"{name} {problem}; run `attnstore verify`")
        return commit

    def summaries(self, units: Iterable[int]) -> dict[int, UnitSummary]:
        """Return a summary of each of these units that is committed.

        What the snapshot and the plan tell together needs no commit: where a unit's rows are as
        many as its stored prompts have tokens, those are its rows. Other commits are read, once.
        """
        names = {unit: name for unit in units if (name := self._committed.key(unit)) is not None}
        known = self._commits.summaries
        missing = [unit for unit, name in names.items() if name not in known]
        told = self.states.summaries(missing)
        known.update({names[unit]: summary for unit, summary in told.items()})
        self._threads.map(self.commit, [unit for unit in missing if unit not in told])
        found = {unit: known[name] for unit, name in names.items()}
        self._check_lengths(found.values())
        return found

    def _check_lengths(self, summaries: Iterable[UnitSummary]) -> None:
        """Hold units, and prompts of far more rows than the plan gives them tokens, against it.

        Raises `FormatError` as `check` does.
        """
        lengths = np.asarray(self.table()["num_tokens"].to_numpy(), np.int64)
        for one in summaries:
            problem = self._plan.span_problem(one.unit, one.first_prompt, len(one.num_rows))
            if problem is not None:
                raise FormatError(
                    f"the commit of unit {one.unit} {problem}; run `attnstore verify`"
                )
            planned = lengths[one.first_prompt : one.first_prompt + len(one.num_rows)]
            for place in np.flatnonzero(one.num_rows > planned + ROWS_AHEAD).tolist():
                if (commit := self.commit(one.unit)) is not None:
                    self._check_rows(PromptPlace(one.first_prompt + place, one.unit, place), commit)

    def prompts(self) -> pa.Table:
        """Return the prompts table with every prompt's status and reason, made once.

        `status` is stored, failed, skipped, pending or damaged; the last is warned of.
        """
        with self._lock:
            if self._prompts is None:
                status, reason = self.states.of_prompts()
                table = self.table()
                first = ["prompt_id", "num_tokens", "text"]
                more = [c for c in table.column_names if c not in (*first, "plan_reason")]
                chosen = table.select([*first, *more]).add_column(2, "status", status)
                self._prompts = chosen.add_column(3, "reason", reason)
            return self._prompts

    def _own(self, segments: list[PlanManifest]) -> list[PlanManifest]:
        for plan in segments:
            if plan.run_id != self._run_id:
                raise FormatError(
                    f"plan segment {plan.segment} belongs to run {plan.run_id}, not {self._run_id}"
                )
        return segments

    def _map_all(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return self._threads.map(function, list(items))


def _positions(commit: Commit, place: int) -> NDArray[np.int64]:
    first = commit.prompts.first_position[place]
    return np.arange(first, first + commit.prompts.num_rows[place], dtype=np.int64)


def _is(outcome: Outcome) -> str:
    return "failed" if outcome is Outcome.FAILED else "was skipped"
