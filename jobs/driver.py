"""Run a config to its end: the one driver; it prepares, assigns and watches, and touches no tensor.

Without a missing unit it starts nothing: no owner object, no Ray, no engine. Otherwise it claims
the run, starts the pool and steps the dispatcher until all units are committed or the policy ends
the run. What is done is in the store alone, so the driver may die at any moment.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from jobs.bound import Bound, find_bound
from jobs.config import RunConfig
from jobs.dispatch import Dispatcher
from jobs.dry_run import check_quota
from jobs.errors import ConfigError, ExitCode, RunInterrupted, RunStopped
from jobs.event_log import EventLog
from jobs.fleet import DispatchLimits
from jobs.frozen import PROBE_SOURCE
from jobs.mend import Damage, find_damage
from jobs.messages import WorkerFacts, WorkerSpec
from jobs.meter import Meter
from jobs.metrics import RunMetrics
from jobs.model_identity import captured_layers, check_chosen, check_probe, check_supported
from jobs.owner import RunOwner
from jobs.plan import PlanProgress
from jobs.policy import Event
from jobs.prepare import (
    PreparedRun,
    check_source,
    committed_mask,
    create_run,
    done_mask,
    extend_run,
    find_done,
    find_run,
    unit_columns,
)
from jobs.progress import ProgressView
from jobs.schedule import Schedule
from jobs.snapshots import SnapshotKeeper, write_snapshot_now
from jobs.start_once import start_once
from jobs.status import RunStatus, read_status
from jobs.watch import Watch
from jobs.worker import CaptureWorker
from store import keys
from store.commit import begin_repair
from store.errors import DamagedObject, FrozenFieldChanged, ObjectExists, StoreError, is_outage
from store.objects.open import open_store
from store.objects.protocol import ObjectStore
from store.run_format import ModelManifest
from store.sealed_json import MAX_JSON_BYTES
from store.selection import describe, describe_bare
from store.weights import WEIGHTS

if TYPE_CHECKING:
    from jobs.ray_pool import RayPool

STEP_SECONDS = 0.25
_AGAIN = "run the same command to go on"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a command line adds to a config."""

    extend: bool = False
    take_over: bool = False
    repair: bool = False
    """Verify the run first, capture again what is damaged and make again what is derived."""
    deep: bool = False
    """With `repair`: read every stored byte to find damage."""
    verbose: bool = False
    worker: type[CaptureWorker] = CaptureWorker
    """The actor's class; tests put one here whose engine fails on purpose."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended."""

    status: RunStatus
    run_id: str
    bound: Bound | None = None
    """What this driver's part of the run waited for; None where it captured nothing."""

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.SOME_FAILED if self.status.prompts_failed else ExitCode.DONE


def run(
    config: RunConfig, options: RunOptions, log: EventLog, view: Callable[[], ProgressView]
) -> RunOutcome:
    """Capture what is missing of the config's run and return how it stands.

    Raises a `JobError` or a store's `RunError` with what to do next; `RunInterrupted` where running
    again goes on.
    """
    if options.deep and not options.repair:
        raise ConfigError("--deep says how --repair looks for damage: give --repair too")
    location = config.location()
    objects = open_store(location.url, location.options)
    with _outages():
        prepared = find_run(objects, config)
        if prepared is not None and not options.extend:
            _check_source(config, prepared, log)
            if not options.repair and committed_mask(objects, prepared).all():
                return _nothing_to_do(objects, prepared, log)
        owner = RunOwner.claim(
            objects, take_over=options.take_over, tell=lambda m: log("waiting", why=m)
        )
    try:
        # Another driver may have made, extended or finished the run until the claim.
        before, prepared = prepared, find_run(objects, config)
        if prepared is not None and prepared != before and not options.extend:
            _check_source(config, prepared, log)
        damage = Damage()
        if prepared is not None and options.repair:
            damage = find_damage(objects, prepared, deep=options.deep, log=log)
            if not damage and not options.extend and committed_mask(objects, prepared).all():
                return _nothing_to_do(objects, prepared, log)
        prepared = _prepare(objects, config, prepared, options, log)
        log.run_id = prepared.manifest.run_id
        check_quota(objects, config, prepared)
        bound = _capture(objects, config, prepared, damage, owner, options, log, view)
        if damage.snapshot:
            write_snapshot_now(objects, prepared.manifest.run_id)
    except StoreError as error:
        raise RunInterrupted(f"the store failed under the driver: {error}") from error
    finally:
        with suppress(StoreError):  # Without a goodbye the next driver only waits a little.
            owner.release()
    with _outages():
        status = _sound_status(objects)
    if not status.complete:
        # The store has the last word, whatever workers reported.
        missing = status.units_planned - status.units_committed - status.units_quarantined
        raise RunInterrupted(
            f"all units were reported done, but {missing} of {status.units_planned} have no commit "
            f"in {objects.url}; run the same command again"
        )
    return RunOutcome(status, prepared.manifest.run_id, bound)


@contextmanager
def _outages() -> Iterator[None]:
    """Say of an outage before or after the work that running again goes on, as one within it."""
    try:
        yield
    except StoreError as error:
        if is_outage(error):
            raise RunInterrupted(
                f"the store failed under the driver: {error}; run the same command again later"
            ) from error
        raise


def _nothing_to_do(objects: ObjectStore, prepared: PreparedRun, log: EventLog) -> RunOutcome:
    log.run_id = prepared.manifest.run_id
    log("nothing to do", units=prepared.num_units)
    return RunOutcome(_sound_status(objects), prepared.manifest.run_id)


def _sound_status(objects: ObjectStore) -> RunStatus:
    """Return how the run stands. Raises `DamagedObject` where commits cannot be read."""
    status = read_status(objects)
    if damage := status.damage():
        raise DamagedObject(damage)
    return status


def _prepare(
    objects: ObjectStore,
    config: RunConfig,
    found: PreparedRun | None,
    options: RunOptions,
    log: EventLog,
) -> PreparedRun:
    check_supported(config.model, config.engine_settings())
    check_chosen(config.model, config.capture)
    check_probe(config.model, config.capture)

    def planning(done: PlanProgress) -> None:
        log("planned so far", prompts=done.prompts, tokens=done.tokens, unusable=done.unusable)

    if found is None:
        log("planning", source=config.prompts.source)
        run = create_run(objects, config, planning)
    elif options.extend:
        log("extending", source=config.prompts.source, segment=len(found.segments))
        run = extend_run(objects, config, found, planning)
    else:
        return found
    last = run.segments[-1]
    log(
        "planned",
        prompts=last.num_prompts,
        tokens=last.num_tokens,
        units=last.num_units,
        plan=last.plan_hash[:12],
    )
    if bare := describe_bare(run.manifest.layers_without_attention):
        captured = captured_layers(config.model, config.capture)
        log("layers", captured=describe(captured), others=bare)
    return run


def _check_source(config: RunConfig, prepared: PreparedRun, log: EventLog) -> None:
    warning = check_source(config, prepared)
    if warning is not None:
        log("source not readable", detail=warning)


def _capture(
    objects: ObjectStore,
    config: RunConfig,
    prepared: PreparedRun,
    damage: Damage,
    owner: RunOwner,
    options: RunOptions,
    log: EventLog,
    view: Callable[[], ProgressView],
) -> Bound | None:
    committed = find_done(objects, prepared)
    done = done_mask(committed, prepared.num_units)
    units = unit_columns(objects, prepared)
    again = {*damage.units, *(unit for unit in committed.lost if unit < len(units))}
    repairs = {u: begin_repair(objects, u, named=committed.repair(u)) for u in sorted(again)}
    done[list(damage.units)] = False
    schedule = Schedule(units, done, config.workers.max_attempts, repairs)
    if not schedule.num_missing and not damage.weights:
        return None
    from jobs.ray_pool import RayPool, connect, disconnect

    spec = WorkerSpec(
        run_id=prepared.manifest.run_id,
        location=config.location(),
        engine=config.engine_settings(),
        capture=replace(
            config.capture_settings(), probe_source=prepared.manifest.frozen.get(PROBE_SOURCE)
        ),
        units_in_flight=config.engine.units_in_flight,
        self_check=config.self_check,
        model=config.model,
        frozen=prepared.manifest.frozen,
    )
    log("starting", missing=schedule.num_missing, units=len(units), epoch=owner.epoch)
    connect(config, verbose=options.verbose)
    try:
        pool = RayPool(config, spec, options.worker)
        if not schedule.num_missing:
            _store_weights(objects, pool, config, spec.run_id, damage.weights, log)
            return None
        dispatcher = Dispatcher(schedule, pool, limits(config), log)
        snapshots = SnapshotKeeper(objects, prepared.manifest.run_id)
        watch = Watch(objects, config, owner, dispatcher, pool, snapshots)
        dispatcher.observe(
            lambda facts: store_model(objects, facts, prepared.manifest.run_id), watch.note
        )
        metrics = RunMetrics(prepared.manifest.run_id)
        display = view()
        log.around = display.around
        meter = Meter(dispatcher, schedule, units_planned=len(units), tokens=_tokens(units, done))
        try:
            with _stop_signals() as asked:
                while not dispatcher.finished:
                    if asked and dispatcher.ending is None:
                        log("stopping", signal=asked[0])
                        message = f"{asked[0]}: stopped after what was in flight; {_AGAIN}"
                        dispatcher.end(Event.SIGTERM, message, time.monotonic())
                    dispatcher.step(time.monotonic(), STEP_SECONDS)
                    watch.look()
                    snapshot = meter.snapshot()
                    display.show(snapshot)
                    metrics.set(snapshot)
        finally:
            log.around = lambda write: write()
            display.close(meter.snapshot())
            pool.close()
            snapshots.close()
    finally:
        disconnect()
    _raise_ending(dispatcher, schedule)
    return find_bound(dispatcher.counters.stalls)


def _store_weights(
    objects: ObjectStore,
    pool: RayPool,
    config: RunConfig,
    run_id: str,
    weights: Sequence[str],
    log: EventLog,
) -> None:
    """Have an engine store what of W_O was deleted, when it starts."""
    try:
        facts = start_once(pool, config.workers.start_deadline_seconds)
    finally:
        pool.close()
    store_model(objects, facts, run_id)
    held = {info.name for info in objects.list(WEIGHTS)}
    if missing := sorted(set(weights) - held):
        raise RunStopped(f"an engine was started for {missing[0]} and did not store it")
    log("stored anew", names=list(weights))


def limits(config: RunConfig) -> DispatchLimits:
    """Return the config's numbers that dispatching obeys."""
    workers = config.workers
    return DispatchLimits(
        lowest=workers.lowest,
        highest=workers.highest,
        units_in_flight=config.engine.units_in_flight,
        unit_deadline_seconds=workers.unit_deadline_seconds,
        start_deadline_seconds=workers.start_deadline_seconds,
        store_patience_seconds=workers.store_patience_seconds,
        drain_seconds=workers.drain_seconds,
        duplicate_stragglers=workers.duplicate_stragglers,
    )


def store_model(objects: ObjectStore, facts: WorkerFacts, run_id: str) -> None:
    """Create `model.json` from the first engine; refuse a later engine that computes otherwise."""
    model = facts.engine.model
    try:
        objects.create(keys.MODEL, model.to_bytes())
        return
    except ObjectExists:
        data = objects.get(keys.MODEL, max_bytes=MAX_JSON_BYTES)
    before = ModelManifest.from_bytes(data, keys.MODEL)
    for name in ("architecture", "dtype", "hidden_size", "layers"):
        if getattr(before, name) != getattr(model, name):
            raise FrozenFieldChanged(
                f"the engine's {name} is not what run {run_id} was captured with ({keys.MODEL}): "
                f"{_short(getattr(before, name))} then, {_short(getattr(model, name))} now"
            )


@contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """Note SIGTERM and Ctrl-C for the loop, which drains; a second one drops what is in flight.

    The handler itself neither logs nor dispatches: it runs in the middle of whatever the driver
    does, which may hold the log's lock.
    """
    asked: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)
        if len(asked) > 1:
            raise RunInterrupted(f"{asked[-1]} again: stopped at once; {_AGAIN}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_ending(dispatcher: Dispatcher, schedule: Schedule) -> None:
    ending = dispatcher.ending
    if ending is None or not schedule.num_missing:
        return
    message = f"{ending.message}\n({schedule.num_missing} units are still missing)"
    if ending.exit_code == ExitCode.INTERRUPTED:
        raise RunInterrupted(message)
    raise RunStopped(message)


def _tokens(units: Any, done: Any) -> int:
    return int(units.num_tokens[~done].sum())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
