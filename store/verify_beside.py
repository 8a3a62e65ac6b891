"""Verification of what lies beside a run's data: W_O, summaries, self-checks, owners.

No commit names these, so they are found by listing. Each is checked against what it says of itself
and against `model.json`; names that belong to nothing are reported, for whoever reads the folder
would take them for part of the run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from store import keys
from store.checks import is_self_check, read_check
from store.errors import ObjectNotFound, RunError, StoreError
from store.objects.protocol import ObjectInfo, ObjectStore
from store.parquet_file import read_parquet
from store.run_format import ModelManifest, RunManifest
from store.sealed_json import MAX_JSON_BYTES, unseal
from store.summaries import SUMMARIES, SummaryManifest, summary_problem
from store.verify_report import VerifyReport
from store.weights import (
    WEIGHTS,
    projection_contradiction,
    read_output_projection,
    stored_bytes,
    weight_key,
)

_SUMMARY_FILE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}/[0-9a-f]{16}\.parquet")


def check_beside(
    objects: ObjectStore,
    run: RunManifest | None,
    model: ModelManifest | None,
    report: VerifyReport,
    *,
    deep: bool,
) -> None:
    """Check everything beside the data: names and sizes, with `deep` every byte."""
    run_id = None if run is None else run.run_id
    due = set() if run is None or model is None else due_weights(run.config, model)
    _check_weights(objects, run_id, model, due, report, deep=deep)
    _check_summaries(objects, run_id, report, deep=deep)
    for prefix in (keys.OWNERS, keys.CHECKS):
        for info in objects.list(prefix):
            if deep and info.name.endswith(".json"):
                _count(report, info)
                try:
                    if is_self_check(info.name):
                        read_check(objects, run_id, info.name)
                    else:
                        unseal(objects.get(info.name, max_bytes=MAX_JSON_BYTES), info.name)
                except (RunError, StoreError) as error:
                    report.add(info.name, error)


def due_weights(config: Mapping[str, Any], model: ModelManifest) -> set[str]:
    """Return the names of the W_O that a run of this config keeps."""
    capture = config.get("capture")
    if not isinstance(capture, dict) or capture.get("output_weights") is not True:
        return set()
    chosen = capture.get("layers")
    return {weight_key(one.layer) for one in model.layers if chosen is None or one.layer in chosen}


def _check_weights(
    objects: ObjectStore,
    run_id: str | None,
    model: ModelManifest | None,
    due: set[str],
    report: VerifyReport,
    *,
    deep: bool,
) -> None:
    layers = {} if model is None else {weight_key(one.layer): one for one in model.layers}
    for info in objects.list(WEIGHTS):
        _count(report, info)
        due.discard(info.name)
        layer = layers.get(info.name)
        if model is None or layer is None:
            report.add(info.name, "is no W_O of a layer of the run's model")
            continue
        expected = stored_bytes(layer, model)
        if info.bytes not in expected:
            report.add(info.name, f"has {info.bytes} bytes, a W_O of this model {expected[0]}")
        elif deep:
            try:
                projection = read_output_projection(objects, layer.layer, run_id)
                problem = projection_contradiction(projection, layer, model)
            except (RunError, StoreError) as error:
                problem = str(error)
            if problem is not None:
                report.add(info.name, problem)
    for name in sorted(due):
        report.add(name, "is missing, though capture.output_weights keeps it")


def _check_summaries(
    objects: ObjectStore, run_id: str | None, report: VerifyReport, *, deep: bool
) -> None:
    found = {info.name.removeprefix(SUMMARIES): info for info in objects.list(SUMMARIES)}
    for name, info in found.items():
        _count(report, info)
        if name.endswith(".json") and "/" not in name:
            _check_summary(objects, run_id, name.removesuffix(".json"), found, report, deep=deep)
        elif not _SUMMARY_FILE.fullmatch(name):
            report.add(info.name, "is no part of a summary")


def _check_summary(
    objects: ObjectStore,
    run_id: str | None,
    name: str,
    found: dict[str, ObjectInfo],
    report: VerifyReport,
    *,
    deep: bool,
) -> None:
    key = f"{SUMMARIES}{name}.json"
    try:
        manifest = SummaryManifest.from_bytes(objects.get(key, max_bytes=MAX_JSON_BYTES), key)
    except (RunError, StoreError) as error:
        report.add(key, error)
        return
    if manifest.name != name:
        report.add(key, f"says it is summary {manifest.name!r}")
    if run_id is not None and manifest.run_id != run_id:
        report.add(key, f"belongs to run {manifest.run_id}, not {run_id}")
    held = found.get(f"{name}/{manifest.file.name}")
    size = _size(objects, f"{SUMMARIES}{name}/{manifest.file.name}") if held is None else held.bytes
    if size != manifest.file.bytes:
        report.add(
            key, f"its table {manifest.file.name} has {size} bytes, not {manifest.file.bytes}"
        )
    elif deep:
        try:
            table = read_parquet(objects, f"{SUMMARIES}{name}/", manifest.file)
            if problem := summary_problem(table):
                report.add(key, problem)
        except (RunError, StoreError) as error:
            report.add(key, error)


def _size(objects: ObjectStore, name: str) -> int | None:
    """Return the size of a table that was saved after the listing; None if it is not there."""
    try:
        return objects.size(name)
    except ObjectNotFound:
        return None


def _count(report: VerifyReport, info: ObjectInfo) -> None:
    report.objects += 1
    report.bytes += info.bytes
