"""The figures of a run's self-checks, kept beside its data in `checks/`.

`run.json` is created once, before any engine starts, so what the first engine measured cannot be
part of it. Each check has an object of its own, named by what may change between two starts of a
run: the ranks of an engine and the libraries' versions. Figures are advisory: nothing that is read
of a run depends on them. Knows documents and object stores; never knows how a check is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from store import keys
from store.errors import FormatError
from store.objects.protocol import ObjectStore
from store.run_format import Count, Document
from store.sealed_json import MAX_JSON_BYTES, checksum_of

_NAME = re.compile(rf"{keys.CHECKS}self-check(?:-[0-9a-f]{{8}})?\.json")


class SelfCheckFigures(Document):
    """`checks/self-check-<name>.json`: what an engine's first prompts differed by, and where.

    Differences are relative (`reference` is absolute), each with its layer and head.
    """

    kind: Literal["self_check"] = "self_check"
    run_id: str
    created: str = ""
    """ISO 8601. The first runs of version 1 tell neither this nor the ranks and versions."""
    tensor_parallel_size: Count = 0
    versions: dict[str, str] = Field(default_factory=dict)
    prompts: Count
    tokens: Count
    batched: float
    """Rows of prompts alone against rows of the same in a batch, over all sites."""
    batched_at: str
    noise: float | None = None
    """Rows of prompts alone against rows of the same alone once more."""
    mixed: float | None
    """Pattern @ v against z; None where the sites for it are not captured."""
    mixed_at: str = ""
    tolerance: float
    reference: float | None
    """Patterns against transformers' eager ones."""
    reference_at: str
    """Where that was, or why there is none."""
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Return all of it as plain values, without what every document of the run has."""
        return self.model_dump(mode="json", exclude={"format_version", "kind", "run_id"})

    def sentence(self) -> str:
        """Return the figures in one line."""
        parts = [f"alone or in a batch {self.batched:.1g}"]
        if self.mixed is not None:
            parts.append(f"pattern @ v {self.mixed:.1g}")
        if self.reference is not None:
            parts.append(f"transformers {self.reference:.1g}")
        return f"{self.prompts} prompts differ by at most: {', '.join(parts)}"


def self_check_key(tensor_parallel_size: int, versions: Mapping[str, str]) -> str:
    """Return the name of the self-check of engines of so many ranks and these versions."""
    what = {"tensor_parallel_size": tensor_parallel_size, "versions": dict(versions)}
    return f"{keys.CHECKS}self-check-{checksum_of(what)}.json"


def is_self_check(name: str) -> bool:
    """Whether an object of this name holds a self-check's figures."""
    return _NAME.fullmatch(name) is not None


def read_checks(objects: ObjectStore, run_id: str) -> tuple[SelfCheckFigures, ...]:
    """Return the figures of every self-check of the run, oldest first; one listing and them.

    Raises `DamagedObject`, and `FormatError` where they are another run's.
    """
    names = [info.name for info in objects.list(keys.CHECKS) if is_self_check(info.name)]
    found = [read_check(objects, run_id, name) for name in names]
    return tuple(sorted(found, key=lambda figures: figures.created))


def read_check(objects: ObjectStore, run_id: str | None, name: str) -> SelfCheckFigures:
    """Return the figures at `name`. Raises `DamagedObject`, and `FormatError` where they are
    another run's."""
    data = objects.get(name, max_bytes=MAX_JSON_BYTES)
    figures = SelfCheckFigures.from_bytes(data, name)
    if run_id is not None and figures.run_id != run_id:
        raise FormatError(
            f"{name} belongs to run {figures.run_id}, not {run_id}; delete it, the next start of "
            "the run checks again"
        )
    return figures
