"""What a run's data depends on, and whether it is still so: for the driver and for every worker.

The driver freezes these fields in `run.json` and compares them whenever the run goes on. A worker
loads whatever lies at the model's path when it starts, be it days later or on another node; so each
compares the model's part again, before its engine is started and once the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from capture.errors import ProbeError
from capture.probe_source import probe_source
from jobs import model_identity
from jobs.config import ModelConfig, RunConfig
from jobs.errors import ConfigError
from jobs.unit_size import UNIT_SIZE
from store.errors import FrozenFieldChanged
from store.run_format import RunManifest

PROBE_SOURCE = "capture.probe_source"

HUB_COMMIT = "model.hub_commit"

_SINCE_LATER = (PROBE_SOURCE, "model.sampled_content", HUB_COMMIT)
"""What runs of the first versions did not freeze."""

_MODEL_HINT = "other model or tokenizer files, or the same path's files changed"
_HINTS = {
    "model.fingerprint": _MODEL_HINT,
    "model.sampled_content": _MODEL_HINT,
    HUB_COMMIT: "the hub's branch has moved; to go on, set model.revision to the first of these",
    PROBE_SOURCE: "the probe's source changed under the same name",
}

_OF_FILES = ("model.fingerprint", "model.sampled_content", HUB_COMMIT)
"""The model's fields that are of what lies at its path, not of the config."""


def model_fields(model: ModelConfig) -> dict[str, Any]:
    """Return what the files of a model and its tokenizer are now, by frozen field."""
    found = (
        model_identity.fingerprint(model),
        model_identity.content(model),
        model_identity.hub_commit(model),
    )
    return dict(zip(_OF_FILES, found, strict=True))


def frozen_fields(config: RunConfig) -> dict[str, Any]:
    """Return all that the run's data depends on: the config's frozen fields and the model."""
    found = {
        **config.frozen_fields(),
        "model.max_model_len": model_identity.max_model_len(config.model),
        **model_fields(config.model),
    }
    if config.capture.probe is not None:
        try:
            found[PROBE_SOURCE] = probe_source(config.capture.probe)
        except ProbeError as error:
            raise ConfigError(str(error)) from error
    return found


def check_frozen(manifest: RunManifest, frozen: dict[str, Any]) -> None:
    """Raise `FrozenFieldChanged` for the first field that differs from the run's.

    A unit size that the config leaves open is the run's own. What the first versions did not freeze
    is compared where the run has it, and a hub name's commit where both times it could be told; of
    the same commit it does not matter by which revision it was named.
    """
    open_sizes = [name for name in UNIT_SIZE if frozen.get(name) is None]
    frozen = {**frozen, **{name: manifest.frozen.get(name) for name in open_sizes}}
    changed = _first_changed({*manifest.frozen, *frozen}, manifest.frozen, frozen)
    if changed is not None:
        before, now = manifest.frozen.get(changed), frozen.get(changed)
        hint = _HINTS.get(changed, "the stored data depends on it")
        raise FrozenFieldChanged(
            f"{changed} is frozen: this run was made with {before!r}, the config says {now!r} "
            f"({hint}). Restore it, or give the new settings another output"
        )


def check_model(model: ModelConfig, frozen: Mapping[str, Any], where: str) -> None:
    """Raise `FrozenFieldChanged` where the model's files are not those that a run was made with.

    `where` says which process looked at them.
    """
    found = model_fields(model)
    changed = _first_changed(_OF_FILES, frozen, found)
    if changed is not None:
        raise FrozenFieldChanged(
            f"{changed} is frozen: this run was made with {frozen.get(changed)!r}, and {where} "
            f"finds {found[changed]!r} at {model.path} ({_HINTS[changed]}). Nothing was captured "
            "from it; restore the model there and run the same command again"
        )


def _first_changed(
    names: Iterable[str], frozen: Mapping[str, Any], found: Mapping[str, Any]
) -> str | None:
    commit = frozen.get(HUB_COMMIT)
    same_commit = commit is not None and commit == found.get(HUB_COMMIT)
    for name in sorted(names):
        if same_commit and name in ("model.revision", "model.fingerprint"):
            continue
        if name in _SINCE_LATER and name not in frozen:
            continue
        before, now = frozen.get(name), found.get(name)
        if name == HUB_COMMIT and None in (before, now):
            continue
        if before != now:
            return name
    return None
