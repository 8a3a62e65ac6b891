"""YAML files and `--set key=value` into a `RunConfig`, with messages a user can act on.

A wrong key is answered with the nearest right one and where it was; nothing is ever guessed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from jobs.config import RunConfig
from jobs.config_yaml import read_yaml
from jobs.errors import ConfigError
from jobs.nesting import MAX_NESTING, is_too_nested

MAX_CONFIG_BYTES = 1 << 20
_SHORT = {"model": "path", "generate": "tokens"}
"""Sections that may be written as the value of one key of theirs."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file and apply `--set` overrides (`dotted.key=yaml value`), in order.

    Raises `ConfigError` naming the file, the key and the nearest right key.
    """
    name = str(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the config {name}: {error.strerror or error}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{name} is {len(data)} bytes long; give the path of a YAML file")
    try:
        body = read_yaml(data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} is not readable as YAML: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{name} must be a mapping with the keys {_keys(RunConfig)}")
    for override in overrides:
        apply_override(body, override)
    return parse_config(body, name)


def parse_config(body: Mapping[str, Any], name: str = "config") -> RunConfig:
    """Validate a config body; `name` is where it came from, for messages."""
    deep = next((key for key, value in body.items() if is_too_nested(value)), None)
    if deep is not None:
        raise ConfigError(f"{name} cannot be used: {deep} is nested more than {MAX_NESTING} deep")
    try:
        return RunConfig.model_validate(body)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors(include_url=False)]
        raise ConfigError("\n  ".join([f"{name} cannot be used:", *lines])) from error


def apply_override(body: dict[str, Any], override: str) -> None:
    """Set one dotted key of a config body, e.g. `workers.count=2`; the value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r} is not key=value, e.g. --set workers.count=2")
    try:
        value = read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: {text!r} is not readable as YAML: {error}") from error
    *parents, last = key.strip().split(".")
    place = body
    for parent in parents:
        inner = place.get(parent)
        if inner is None:
            inner = place[parent] = {}
        elif parent in _SHORT and not isinstance(inner, dict):
            inner = place[parent] = {_SHORT[parent]: inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {key}: {parent} is {inner!r}, which has no keys inside")
        place = inner
    place[last] = value


def _explain(detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    where = ".".join(location) or "the config"
    if detail["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"{where}: no such key; {hint}"
    if detail["type"] == "missing":
        return f"{where}: must be set"
    return f"{where}: {detail['msg']} (got {detail['input']!r})"


def _fields_at(location: Sequence[str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in location:
        info = model.model_fields.get(part)
        if info is None or not (isinstance(info.annotation, type)):
            return []
        if not issubclass(info.annotation, BaseModel):
            return []
        model = info.annotation
    return list(model.model_fields)


def _keys(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)
