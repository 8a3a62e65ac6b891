"""The commits of a run as a reader keeps them: read once, held against the run and its model.

Knows commits by their names; never knows which of them count or what the plan says, so that one
cache serves every state in which a run is seen. Keeps the commits used last, and of every commit
read a summary.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from store import keys
from store.ahead import Begin, Begun
from store.commit import read_commit, require_run
from store.due_sites import site_contradictions
from store.errors import DamagedObject, FormatError, RunError
from store.generated import GENERATED, Continuation, read_generated
from store.model_check import model_contradictions, read_model
from store.objects.protocol import ObjectStore
from store.run_format import Commit, ModelManifest, Outcome

KEPT_COMMITS = 64

RowProblems = dict[int, str]
"""How the rows of a commit's prompts contradict the plan's tokens, by place."""


@dataclass(frozen=True, slots=True)
class UnitSummary:
    """What a commit says of its prompts, without arrays and objects."""

    unit: int
    first_prompt: int
    stored: NDArray[np.bool_]
    num_rows: NDArray[np.int64]
    first_positions: NDArray[np.int64]

    @classmethod
    def of(cls, commit: Commit) -> UnitSummary:
        """Return the summary of a commit."""
        return cls(
            unit=commit.unit,
            first_prompt=commit.first_prompt,
            stored=np.asarray([one is Outcome.STORED for one in commit.prompts.outcome], bool),
            num_rows=np.asarray(commit.prompts.num_rows, np.int64),
            first_positions=np.asarray(commit.prompts.first_position, np.int64),
        )


class CommitCache:
    """The commits of one run, by name. Safe to use from several threads."""

    def __init__(
        self,
        objects: ObjectStore,
        begin: Begin,
        run_id: str,
        due: frozenset[str] = frozenset(),
    ) -> None:
        """`due`: the sites that every unit holds, as `store.due_sites` tells them."""
        self._objects = objects
        self._begin = begin
        self._run_id = run_id
        self._due = due
        self._lock = threading.Lock()
        self._commits: OrderedDict[str, Commit] = OrderedDict()
        self._problems: dict[str, RowProblems] = {}
        self._said: OrderedDict[tuple[int, str], dict[int, Continuation]] = OrderedDict()
        self._beginning: dict[str, Begun[Commit]] = {}
        self._model: ModelManifest | None = None
        self.summaries: dict[str, UnitSummary] = {}
        """Of every commit that was read or that a snapshot describes; a name's never changes."""

    def emptied(self) -> CommitCache:
        """Return a cache of the same run that has no commit yet."""
        other = CommitCache(self._objects, self._begin, self._run_id, self._due)
        other._model = self._model
        return other

    def model(self) -> ModelManifest | None:
        """Return what `model.json` says, or None while no engine has started."""
        if self._model is None:
            self._model = read_model(self._objects, self._run_id)
        return self._model

    def look_for_model(self, first: ObjectStore) -> None:
        """Read the model early; whoever needs it meets the error that this leaves out."""
        if self._model is None:
            try:
                self._model = read_model(first, self._run_id)
            except RunError:
                return

    def begin(self, name: str) -> None:
        """Begin to read a commit that will be asked for."""
        self._beginning[name] = self._begin(partial(read_commit, self._objects, name))

    def get(self, name: str) -> Commit:
        """Return a commit. Raises as `read_commit` does, and where it is not of run and model."""
        with self._lock:
            kept = self._commits.get(name)
            if kept is not None:
                self._commits.move_to_end(name)
                return kept
            begun = self._beginning.pop(name, None)
        commit = read_commit(self._objects, name) if begun is None else begun.result()
        require_run(commit, name, self._run_id)
        if (model := self.model()) is None:
            raise DamagedObject(f"{keys.MODEL} is missing, though {name} is there")
        for problem in chain(
            site_contradictions(commit, self._due), model_contradictions(commit, model)
        ):
            raise FormatError(f"{name}: {problem}; run `attnstore verify`")
        with self._lock:
            self._commits[name] = commit
            self._problems.pop(name, None)
            self.summaries[name] = UnitSummary.of(commit)
            while len(self._commits) > KEPT_COMMITS:
                self._problems.pop(self._commits.popitem(last=False)[0], None)
        return commit

    def continuations(self, commit: Commit) -> dict[int, Continuation]:
        """Return what was generated after the prompts of a commit, by their places."""
        if not has_generated(commit):
            return {}
        name = (commit.unit, commit.attempt)
        with self._lock:
            said = self._said.get(name)
        if said is None:
            said = read_generated(self._objects, commit)
            with self._lock:
                self._said[name] = said
                while len(self._said) > KEPT_COMMITS:
                    self._said.popitem(last=False)
        return said

    def problems(self, commit: Commit, find: Callable[[], RowProblems]) -> RowProblems:
        """Return what `find` does: asked once for as long as the commit is kept."""
        name = keys.commit_key(commit.unit, commit.repair)
        with self._lock:
            known = self._problems.get(name)
            if known is not None and self._commits.get(name) is commit:
                return known
        found = find()
        with self._lock:
            if self._commits.get(name) is commit:
                self._problems[name] = found
        return found


def has_generated(commit: Commit) -> bool:
    """Whether the commit's unit holds tokens that were generated."""
    return any(one.name == GENERATED for one in commit.objects)
