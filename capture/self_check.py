"""Try the engine on a few of the run's own prompts before the run costs anything.

The prompts are captured into a folder that is thrown away: one by one, all in one batch, and one by
one again, which tells the model's own noise. Two things must hold on every layer and head: rows are
the same whatever their prompt was batched with (`same_rows` says how near that must be), and z is
the rebuilt pattern times v. Where transformers loads the checkpoint, the
patterns of some layers must be its own too. All of it goes through the whole path: engine, ranks,
shards, commit, reader. It knows an engine's public calls only.

Legend: L layers, H heads, T rows, D head size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from capture.errors import SelfCheckFailed
from capture.reference import reference_patterns
from capture.same_rows import TOLERANCE, Verdict, head_errors, largest, same_rows
from capture.settings import (
    EngineFacts,
    PromptTask,
    StoreLocation,
    UnitResult,
    UnitStatus,
    UnitTask,
)
from store import attention
from store.array_reader import ArrayReader, ReadOptions
from store.commit import committed_units, read_commit
from store.objects.open import open_store
from store.objects.protocol import ObjectStore
from store.run_format import Commit, LayerSemantics
from store.run_index import PromptPlace, StoredPrompt
from store.unit_arrays import UnitArrays

ALONE, TOGETHER, AGAIN = 0, 1, 2
"""The units of the check."""

MAX_PROMPTS = 4
MAX_TOKENS = 48
"""Of each prompt: enough to fill a row of the pattern, few enough for seconds on a CPU."""
GENERATED_TOKENS = 2
"""After each, in a run that continues prompts; the rows of the prompts' own tokens are compared."""

MIXED_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Of pattern @ v against z, root mean square by head. Both are of one capture, so only the kernel's
own rounding is in it, whatever the model does between its layers."""

PATTERN_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""Largest difference of any entry of a pattern."""


class _Engine(Protocol):
    @property
    def facts(self) -> EngineFacts: ...
    @property
    def in_flight(self) -> int: ...
    def admit(self, task: UnitTask) -> None: ...
    def advance(self) -> list[UnitResult]: ...
    def reopen(self, location: StoreLocation) -> None: ...


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was tried and the largest differences, relative, with their layer and head."""

    prompts: int
    tokens: int
    batched: float
    """Rows alone against rows in a batch, over all sites."""
    batched_at: str
    noise: float
    """Rows alone against rows alone once more."""
    mixed: float | None
    """Pattern @ v against z; None where the sites for it are not captured."""
    mixed_at: str
    tolerance: float
    reference: float | None
    """Patterns against transformers' eager ones, absolute; in 16 bits of the first layer only."""
    reference_at: str
    """Where that was, or why there is none."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def self_check(
    engine: _Engine, prompts: Sequence[np.ndarray], location: StoreLocation, model: str
) -> SelfCheck | None:
    """Capture the start of some prompts alone and together, and compare; then open `location`.

    `model` is the checkpoint's folder, for transformers. None where there is no prompt to try, or
    the engine refuses all of them. Raises `SelfCheckFailed`, naming layer and head.
    """
    tried = [ids[:MAX_TOKENS] for ids in prompts if len(ids)][:MAX_PROMPTS]
    if not tried:
        return None
    with tempfile.TemporaryDirectory(prefix="attnstore-check-") as folder:
        engine.reopen(StoreLocation(folder))
        tasks = tuple(PromptTask(ids) for ids in tried)
        for unit, batch in ((ALONE, 1), (TOGETHER, 0), (AGAIN, 1)):
            attempt, first = f"check{unit}", unit * len(tried)
            _run(engine, UnitTask(unit, attempt, first, tasks, 0, batch, GENERATED_TOKENS))
        found = _compare(engine.facts, open_store(folder), tried, model)
    engine.reopen(location)
    return found


def _run(engine: _Engine, task: UnitTask) -> None:
    engine.admit(task)
    while engine.in_flight:
        for result in engine.advance():
            if result.status is not UnitStatus.COMMITTED:
                raise SelfCheckFailed(
                    f"the engine could not capture {len(task.prompts)} of the run's first "
                    f"prompts: {result.error}"
                )


def _compare(
    facts: EngineFacts, objects: ObjectStore, tried: Sequence[np.ndarray], model: str
) -> SelfCheck | None:
    keys = committed_units(objects)
    alone, together, again = (read_commit(objects, keys[unit]) for unit in (ALONE, TOGETHER, AGAIN))
    stored = _stored_places(alone)
    if not stored == _stored_places(together) == _stored_places(again):
        raise SelfCheckFailed(
            f"the self-check failed: of the prompts tried, those at {stored} were stored alone, "
            f"{_stored_places(together)} in a batch and {_stored_places(again)} alone again; "
            "nothing was stored. Please report it with the model's name"
        )
    if not stored:
        return None
    arrays = UnitArrays(ArrayReader(objects, ReadOptions(threads=2)))
    batched, mixed, noise = Verdict(), Verdict(), 0.0
    records = [array for array in alone.arrays if not array.is_packed]
    sites = [array.site for array in records]
    layers = records[0].layers
    heads = {array.site: array.heads for array in records}
    can_mix = {"rot_q", "rot_k", "v", "z"} <= set(sites)
    for place in stored:
        # Fewer where chosen positions are kept, more where the prompt was continued.
        rows = min(len(tried[place]), alone.prompts.num_rows[place])
        one = {site: _rows(arrays, alone, place, site, rows) for site in sites}
        twice = {site: _rows(arrays, again, place, site, rows) for site in sites}
        own = max(float(head_errors(twice[site], one[site]).max()) for site in sites)
        noise = max(noise, own)
        for site in sites:
            for other in (_rows(arrays, together, place, site, rows), twice[site]):
                found = same_rows(
                    f"{site} of prompt {place}",
                    layers,
                    heads[site],
                    other,
                    one[site],
                    dtype=facts.model.dtype,
                    noise=own,
                )
                batched = batched.worse(found)
        if can_mix:
            mixed_LHTD = _mixed(facts.model.layers, layers, heads, one)
            found = largest(f"prompt {place}", layers, heads["z"], mixed_LHTD, one["z"])
            mixed = mixed.worse(found).worse(_finite(place, layers, heads["z"], one["z"]))
    allowed = MIXED_TOLERANCE[facts.model.dtype]
    if not mixed.fault and not mixed.error <= allowed:
        mixed = replace(mixed, fault=f"{allowed:.2g} is allowed")
    for what, verdict in (
        ("rows depend on what a prompt is batched with", batched),
        ("z is not the rebuilt pattern times v", mixed),
    ):
        if verdict.fault:
            raise SelfCheckFailed(
                f"the self-check failed: {what}. At {verdict.where} they differ by "
                f"{verdict.error:.2g} (relative), {verdict.fault}; run twice alone they differ by "
                f"{noise:.2g}; nothing was stored. Please report it with the model's name; "
                "`self_check: false` goes on regardless"
            )
    reference, reference_at = None, "rot_q or rot_k is not captured"
    if {"rot_q", "rot_k"} <= set(sites):
        longest = max(stored, key=lambda place: len(tried[place]))
        one = {
            site: _rows(arrays, alone, longest, site, len(tried[longest]))
            for site in ("rot_q", "rot_k")
        }
        reference, reference_at = _against_transformers(
            facts, layers, heads, one, tried[longest], model
        )
    return SelfCheck(
        prompts=len(stored),
        tokens=sum(len(tried[place]) for place in stored),
        batched=batched.error,
        batched_at=batched.where,
        noise=noise,
        mixed=mixed.error if can_mix else None,
        mixed_at=mixed.where,
        tolerance=TOLERANCE[facts.model.dtype],
        reference=reference,
        reference_at=reference_at,
    )


def _finite(place: int, layers: Sequence[int], heads: Sequence[int], z_LHTD: np.ndarray) -> Verdict:
    """Judge whether a model's z are numbers: one that overflows compares equal to itself."""
    broken = np.argwhere(~np.isfinite(z_LHTD.astype(np.float32)).all(axis=(2, 3)))
    if not len(broken):
        return Verdict()
    layer, head = broken[0]
    where = f"prompt {place}, layer {layers[layer]}, head {heads[head]}"
    return Verdict(np.inf, where, "the model's z is NaN or infinite there")


def _stored_places(commit: Commit) -> list[int]:
    """Return the places of the prompts that have rows; the engine may refuse others."""
    return [place for place, rows in enumerate(commit.prompts.num_rows) if rows]


def _against_transformers(
    facts: EngineFacts,
    layers: Sequence[int],
    heads: dict[str, list[int]],
    sites: dict[str, np.ndarray],
    token_ids: np.ndarray,
    model: str,
) -> tuple[float | None, str]:
    """Return the largest difference of patterns and where it is, or None and why."""
    exact = facts.model.dtype == "float32"
    # In 16 bits later layers drift apart from a float32 model; the first has seen no other yet.
    chosen = sorted({layers[0], layers[len(layers) // 2], layers[-1]} if exact else {0})
    if not set(chosen) <= set(layers):
        return None, "layer 0 is not captured, or has no attention"
    found = reference_patterns(model, token_ids, chosen)
    if not found.by_layer:
        return None, found.why_not
    worst, where = 0.0, ""
    for number, want_HQK in found.by_layer.items():
        got_HQK = _pattern(facts.model.layers, number, layers.index(number), heads, sites)
        errors_H = np.abs(got_HQK - want_HQK[heads["rot_q"]]).max(axis=(1, 2))
        if float(errors_H.max()) >= worst:
            worst = float(errors_H.max())
            where = f"layer {number}, head {heads['rot_q'][int(errors_H.argmax())]}"
    allowed = PATTERN_TOLERANCE[facts.model.dtype]
    if not worst <= allowed:
        raise SelfCheckFailed(
            f"the self-check failed: patterns are not those of transformers' eager attention. At "
            f"{where} they differ by {worst:.2g}, {allowed:g} is allowed; nothing was stored. "
            "Please report it with the model's name; `self_check: false` goes on regardless"
        )
    return worst, where


def _rows(arrays: UnitArrays, commit: Commit, place: int, site: str, num_rows: int) -> np.ndarray:
    first = commit.prompts.first_row[place]
    stored = StoredPrompt(
        PromptPlace(place, commit.unit, place),
        commit,
        first,
        np.arange(num_rows, dtype=np.int64),
    )
    array = arrays.of(stored, site)
    axes = (np.arange(len(array.layers)), np.arange(len(array.heads)), np.arange(num_rows))
    return array.read(*axes)


def _mixed(
    semantics: Sequence[LayerSemantics],
    layers: Sequence[int],
    heads: dict[str, list[int]],
    sites: dict[str, np.ndarray],
) -> np.ndarray:
    """Return pattern @ v of the stored heads, [L, H, T, D]."""
    by_number = {layer.layer: layer for layer in semantics}
    mixed = []
    for place, number in enumerate(layers):
        layer = by_number[number]
        pattern_HQK = _pattern(semantics, number, place, heads, sites)
        v_KTD = sites["v"][place].astype(np.float32)
        read = [heads["v"].index(attention.kv_head_of(layer, head)) for head in heads["rot_q"]]
        mixed.append(pattern_HQK @ v_KTD[read])
    return np.stack(mixed)


def _pattern(
    semantics: Sequence[LayerSemantics],
    number: int,
    place: int,
    heads: dict[str, list[int]],
    sites: dict[str, np.ndarray],
) -> np.ndarray:
    """Return the pattern of layer `number`, the one at `place` of the arrays, [H, T, T]."""
    layer = next(layer for layer in semantics if layer.layer == number)
    positions = np.arange(sites["rot_q"].shape[2])
    queries, keys = (
        attention.HeadRows(sites[site][place], heads[site], positions)
        for site in ("rot_q", "rot_k")
    )
    return attention.pattern(layer, queries, keys)
