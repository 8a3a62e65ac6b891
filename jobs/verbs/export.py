"""`attnstore export`: a chosen part of a run as files of another kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store import open_run
from store.export import ExportReport, ExportSelection, export


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What the command was told; an empty list is everything."""

    kind: str
    path: Path
    prompts: Sequence[str] = ()
    where: str | None = None
    sites: Sequence[str] = ()
    layers: Sequence[int] = ()
    heads: Sequence[int] = ()
    dtype: str | None = None


def export_run(
    run_url: str, request: ExportRequest, options: Mapping[str, Any] | None = None
) -> ExportReport:
    """Export and say what was written. `where` narrows to stored prompts that meet it."""
    run = open_run(run_url, options)
    prompts: list[str] | None = list(request.prompts) or None
    if request.where is not None:
        met = run.where(f"status = 'stored' and ({request.where})")
        prompts = met if prompts is None else [prompt for prompt in prompts if prompt in set(met)]
    selection = ExportSelection(
        sites=list(request.sites) or None,
        prompts=prompts,
        layers=list(request.layers) or None,
        heads=list(request.heads) or None,
        dtype=request.dtype,
    )
    return export(run, request.kind, request.path, selection)
