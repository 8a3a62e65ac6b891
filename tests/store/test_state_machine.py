"""Writers, kills, duplicate attempts, repairs, gc, snapshots and readers against a dictionary."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from store import keys
from store.commit import begin_repair, commit_unit, committed_units
from store.errors import CommitRefused
from store.gc import collect_garbage
from store.objects.obstore_store import ObstoreStore
from store.run_format import Commit
from store.snapshot import find_committed, write_snapshot
from store.verify import verify_run
from tests.store.committed_values import assert_same_values, committed_values
from tests.store.faults import FaultyStore, InjectedFault, When
from tests.store.sample_run import (
    RUN_ID,
    SampleShape,
    SampleUnit,
    make_unit,
    write_manifests,
    write_unit,
)

SHAPE = SampleShape(num_layers=1, num_heads=2, num_kv_heads=1, head_size=4, sites=("rot_k", "z"))
UNITS = 3
LENGTHS = [[5, 0, 3]] * UNITS
WRITES = 2 + 3 + 1  # shards, zarr.json, commit


@dataclass
class Pending:
    """An attempt whose data is stored and whose commit is not made."""

    commit: Commit
    values: dict[str, np.ndarray]


@dataclass
class Holder:
    """What the model believes of one (unit, repair)."""

    attempt: str
    values: dict[str, np.ndarray]


class StoreMachine(RuleBasedStateMachine):
    """Every attempt has values of its own, so a mixture of two would be seen."""

    pending = Bundle("pending")

    def __init__(self) -> None:
        super().__init__()
        self.objects = ObstoreStore(f"memory://machine-{secrets.token_hex(8)}")
        self.model: dict[int, dict[int, Holder]] = {}
        self.attempts = 0
        write_manifests(self.objects, SHAPE, LENGTHS)

    def _sample(self, unit: int) -> tuple[str, SampleUnit]:
        self.attempts += 1
        sample = make_unit(SHAPE, unit, 3 * unit, LENGTHS[unit], seed=self.attempts)
        return f"a{self.attempts}", sample

    @rule(target=pending, unit=st.integers(0, UNITS - 1))
    def write_without_commit(self, unit: int) -> Pending:
        attempt, sample = self._sample(unit)
        commit = write_unit(self.objects, SHAPE, sample, attempt)
        return Pending(commit, sample.arrays)

    @rule(target=pending, unit=st.integers(0, UNITS - 1))
    def write_a_repair(self, unit: int):
        if not self.model.get(unit):
            return multiple()
        repair = begin_repair(self.objects, unit)
        assert repair == max(self.model[unit]) + 1
        attempt, sample = self._sample(unit)
        commit = write_unit(self.objects, SHAPE, sample, attempt, repair=repair)
        return Pending(commit, sample.arrays)

    @rule(one=pending)
    def commit_it_perhaps_again(self, one: Pending) -> None:
        held = self.model.setdefault(one.commit.unit, {})
        holder = held.get(one.commit.repair)
        try:
            result = commit_unit(self.objects, one.commit)
        except CommitRefused:
            # gc may only have taken the data of an attempt that had lost already.
            assert max(held, default=-1) >= one.commit.repair
            assert (
                holder is None
                or holder.attempt != one.commit.attempt
                or max(held) > one.commit.repair
            )
            return
        if holder is None:
            assert result.won
            held[one.commit.repair] = Holder(one.commit.attempt, one.values)
        else:
            assert result.attempt == holder.attempt
            assert result.won == (holder.attempt == one.commit.attempt)

    @rule(one=consumes(pending))
    def forget_it(self, one: Pending) -> None:
        """The worker dies between its last put and its commit."""

    @rule(
        unit=st.integers(0, UNITS - 1),
        number=st.integers(0, WRITES - 1),
        when=st.sampled_from(When),
    )
    def capture_and_die(self, unit: int, number: int, when: When) -> None:
        attempt, sample = self._sample(unit)
        dying = FaultyStore(self.objects, number, when, dead=True)
        with suppress(InjectedFault):
            commit_unit(dying, write_unit(dying, SHAPE, sample, attempt))
        held = self.model.setdefault(unit, {})
        if 0 not in held and number == WRITES - 1 and when is When.AFTER:
            held[0] = Holder(attempt, sample.arrays)

    @rule()
    def collect(self) -> None:
        collect_garbage(self.objects, delete=True)

    @rule()
    def take_snapshot(self) -> None:
        write_snapshot(self.objects, RUN_ID)

    @invariant()
    def readers_see_what_the_model_holds(self) -> None:
        expected = {
            unit: keys.commit_key(unit, max(held)) for unit, held in self.model.items() if held
        }
        assert committed_units(self.objects) == expected
        found = find_committed(self.objects, RUN_ID)
        assert {unit: found.key(unit) for unit in found.units().tolist()} == expected
        for unit, key in expected.items():
            assert_same_values(
                committed_values(self.objects, key), self.model[unit][max(self.model[unit])].values
            )

    def teardown(self) -> None:
        assert verify_run(self.objects, deep=True).problems == []


StoreMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
TestStore = StoreMachine.TestCase
