"""Whether a plan's files are what its manifests say, and what commits can be held against.

A file that cannot be read is one problem, which also says what was not checked for want of it:
every other file still stands for its own prompts and units. `deep` also works out each segment's
hash, which commits state, from all its prompts and units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store import keys
from store.errors import ObjectNotFound, RunError, StoreError
from store.objects.protocol import ObjectStore
from store.parquet_file import read_parquet
from store.plan import MANIFEST, PROMPT_FIELDS, UNIT_FIELDS, read_segments
from store.plan_contents import (
    PlanDigest,
    coverage_problem,
    first_repeated,
    id_digests,
    prompts_problem,
    units_problem,
)
from store.planned_units import FileTokens, PlannedUnits, kept_positions
from store.run_format import PlanFile, PlanManifest, RunManifest
from store.verify_report import VerifyReport


def check_plan(
    objects: ObjectStore, run: RunManifest | None, report: VerifyReport, *, deep: bool
) -> PlannedUnits | None:
    """Check the plan's files; return its units as far as they can be read, None if not at all."""
    try:
        plans = read_segments(objects)
    except (RunError, ObjectNotFound) as error:
        report.add(keys.PLAN, f"{error}; no commit was held against the plan")
        return None
    check = _PlanCheck(objects, report, deep=deep)
    for plan in plans:
        if run is not None and plan.run_id != run.run_id:
            prefix = keys.plan_prefix(plan.segment)
            report.add(prefix, f"belongs to run {plan.run_id}, not {run.run_id}")
        check.segment(plan)
    check.ids_are_unique()
    kept = None if run is None else kept_positions(run.config)
    return PlannedUnits.of(check.tables, check.tokens, kept, check.unread, plans)


class _PlanCheck:
    """Reads one segment after another; keeps units and token counts, and a digest of each id."""

    def __init__(self, objects: ObjectStore, report: VerifyReport, *, deep: bool) -> None:
        self._objects = objects
        self._report = report
        self._deep = deep
        self._ids: list[tuple[int, NDArray[np.uint64]]] = []
        self.tables: list[pa.Table] = []
        self.tokens: list[FileTokens] = []
        self.unread: list[range] = []

    def segment(self, plan: PlanManifest) -> None:
        """Check all files of one segment."""
        prefix = keys.plan_prefix(plan.segment)
        sums = list(_sums(plan))
        for message in sums:
            self._report.add(prefix + MANIFEST, message)
        listed = {info.name[len(prefix) :]: info.bytes for info in self._objects.list(prefix)}
        digest = PlanDigest()
        has_prompts = self._prompts(plan, listed, digest)
        units = self._units(plan, listed)
        if units is not None and not sums:
            problem = coverage_problem(units, plan.first_prompt, plan.num_prompts)
            digest.add_units(units, UNIT_FIELDS.names)
            found = digest.hexdigest()
            if problem is None and has_prompts and found != plan.plan_hash:
                problem = (
                    f"says plan_hash {plan.plan_hash[:12]}, its files give {found[:12]}: they are "
                    "not of the prompts and units that were planned"
                )
            if problem is not None:
                self._report.add(prefix + MANIFEST, problem)
        self._report.objects += len(plan.prompts) + len(plan.units)
        self._report.bytes += sum(file.bytes for file in [*plan.prompts, *plan.units])

    def ids_are_unique(self) -> None:
        """Report the first prompt whose id was there before."""
        if not self._ids:
            return
        repeated = first_repeated(np.concatenate([digests for _, digests in self._ids]))
        if repeated is None:
            return
        for first, digests in self._ids:
            if repeated < len(digests):
                self._report.add(keys.PLAN, f"prompt {first + repeated} has the id of another one")
                return
            repeated -= len(digests)

    def _prompts(self, plan: PlanManifest, listed: dict[str, int], digest: PlanDigest) -> bool:
        """Check a segment's prompts; return whether all of them were read."""
        prefix, is_whole = keys.plan_prefix(plan.segment), True
        look = partial(prompts_problem, fields=PROMPT_FIELDS) if self._deep else None
        for file, rows in _with_rows(plan.prompts, plan.first_prompt):
            table = self._read(prefix, file, listed, look)
            if isinstance(table, pa.Table):
                counts = np.asarray(table["num_tokens"].to_numpy(), np.int32)
                self.tokens.append(FileTokens(rows.start, counts))
                self._ids.append((rows.start, id_digests(table)))
                digest.add_prompts(table)
                continue
            is_whole = False
            if table is not None:
                not_checked = f"; rows of prompts {_span(rows)} were not held against the plan"
                self._report.add(prefix + file.name, table + (not_checked if self._deep else ""))
        return is_whole

    def _units(self, plan: PlanManifest, listed: dict[str, int]) -> pa.Table | None:
        """Check a segment's units; return them where all were read."""
        prefix, found = keys.plan_prefix(plan.segment), [UNIT_FIELDS.empty_table()]
        for file, units in _with_rows(plan.units, plan.first_unit):
            look = partial(units_problem, fields=UNIT_FIELDS, units=units)
            table = self._read(prefix, file, listed, look)
            if isinstance(table, pa.Table):
                found.append(table.select(UNIT_FIELDS.names).cast(UNIT_FIELDS))
                continue
            self.unread.append(units)
            not_held = f"; commits of units {_span(units)} were not held against the plan"
            self._report.add(prefix + file.name, f"{table}{not_held}")
        self.tables += found
        return pa.concat_tables(found) if len(found) == len(plan.units) + 1 else None

    def _read(
        self,
        prefix: str,
        file: PlanFile,
        listed: dict[str, int],
        look: Callable[[pa.Table], str | None] | None,
    ) -> pa.Table | str | None:
        """Return the file's table, or what is wrong; without `look` only its size counts."""
        found = listed.get(file.name)
        if found != file.bytes:
            return f"has {found} bytes, not {file.bytes}"
        if look is None:
            return None
        try:
            table = read_parquet(self._objects, prefix, file)
        except (RunError, StoreError) as error:
            return str(error)
        problem = look(table)
        return table if problem is None else problem


def _with_rows(files: list[PlanFile], start: int) -> Iterator[tuple[PlanFile, range]]:
    """Yield each file with the run-wide numbers of its rows."""
    for file in files:
        yield file, range(start, start + file.rows)
        start += file.rows


def _sums(plan: PlanManifest) -> Iterator[str]:
    for what, files, stated in (
        ("prompts", plan.prompts, plan.num_prompts),
        ("units", plan.units, plan.num_units),
    ):
        held = sum(file.rows for file in files)
        if held != stated:
            yield f"names files of {held} {what} in all, and says {stated}"


def _span(numbers: range) -> str:
    return f"{numbers.start} to {numbers.stop - 1}"
