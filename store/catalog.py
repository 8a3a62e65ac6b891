"""Many runs: which there are under a URL, and how two of the same prompts differ.

Knows names of objects and opened runs; never knows how a run is laid out inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xarray as xr
from numpy.typing import NDArray

from store import keys
from store.errors import ObjectNotFound, RunError
from store.objects.local import LocalStore
from store.objects.open import open_store
from store.objects.protocol import ObjectStore
from store.prompt_names import Prompt
from store.run import Run, open_run
from store.selection import describe
from store.site_names import SCORES

MAX_RUNS = 10_000
SEEN_OF_A_RUN = 1000
_IN_A_RUN = re.compile(rf"(.*?/)?(?:{keys.CHECKS}|{keys.COMMITS}|{keys.DATA})")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One run of a catalog; `name` is its folder under the catalog's URL."""

    name: str
    url: str


class Catalog(Mapping[str, Run]):
    """The runs under one URL, opened when asked for: `catalog["smollm2/bf16"]`."""

    def __init__(
        self, entries: Sequence[CatalogEntry], options: Mapping[str, Any] | None = None
    ) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._options = options
        self._opened: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if name not in self._opened:
            self._opened[name] = open_run(self._entries[name].url, self._options)
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def table(self) -> pa.Table:
        """Return one row per run: name, model, dtype, sites, layers, prompts, stored, bytes."""
        rows = [{"name": name, **self[name].overview()} for name in self]
        return pa.Table.from_pylist(rows) if rows else pa.table({"name": pa.array([], pa.string())})

    def __repr__(self) -> str:
        return f"<Catalog of {len(self)} runs: {', '.join(list(self)[:8])}>"


def open_catalog(url: str, options: Mapping[str, Any] | None = None) -> Catalog:
    """Return the runs under `url`, found by listing for their `run.json`.

    What lies inside a large run is passed over, other objects below `url` are not: point it at a
    folder of runs, not at a bucket of other things. In a local folder links to runs are found too,
    but none inside of a run. Raises `RunError` for more than 10,000 runs.
    """
    root = url.rstrip("/")
    entries: list[CatalogEntry] = []
    objects = open_store(url, options)
    for folder in chain(_run_folders(objects), _linked_runs(objects)):
        entries.append(CatalogEntry(folder or ".", f"{root}/{folder}" if folder else root))
        if len(entries) > MAX_RUNS:
            raise RunError(f"more than {MAX_RUNS} runs under {url}; open a folder further down")
    return Catalog(sorted(entries, key=lambda entry: entry.name), options)


def _linked_runs(objects: ObjectStore) -> Iterator[str]:
    """Yield the links to runs that lie at the top of a local folder which is no run itself."""
    top = Path(objects.url)
    if isinstance(objects, LocalStore) and top.is_dir() and not (top / keys.RUN).is_file():
        for one in top.iterdir():
            if one.is_symlink() and (one / keys.RUN).is_file():
                yield one.name


def _run_folders(objects: ObjectStore) -> Iterator[str]:
    """Yield the folder of every run, "" for the store's own root.

    A run's own objects are skipped once they fill a page: a listing goes on after the run. Where
    a listing skips nothing there is one, over everything.
    """
    skips = not getattr(objects, "lists_whole_folders", False)
    after: str | None = ""
    others: set[str] = set()
    while after is not None:
        listing, after = objects.list("", after=after), None
        within, seen = "", 0
        for info in listing:
            parent, _, last = info.name.rpartition("/")
            if last == keys.RUN:
                yield parent
            found = _IN_A_RUN.match(info.name)
            if found is None or (folder := found[1] or "") in others:
                continue
            within, seen = folder, seen + 1 if folder == within else 1
            if seen <= SEEN_OF_A_RUN or not skips:
                continue
            name = folder.rstrip("/")
            if not _has_object(objects, folder + keys.RUN):
                others.add(folder)
                continue
            yield name
            # The tilde sorts behind every name that an object of a run can have.
            after = f"{folder}~"
            break


def _has_object(objects: ObjectStore, name: str) -> bool:
    try:
        objects.size(name)
    except ObjectNotFound:
        return False
    return True


def diff(
    first: Run,
    second: Run,
    sites: Sequence[str] | None = None,
    *,
    prompts: Sequence[Prompt] | None = None,
) -> pa.Table:
    """Return how two runs of the same prompts differ, one row per site and layer.

    Columns: site, layer, rows, max (largest absolute difference), mean (mean absolute difference),
    scale (largest absolute value in `first`). `prompts` are ids; None takes all that both store.
    A site may be `pattern`, or `scores`, of which entries that are masked in both do not count; one
    masked in only one of them differs by infinity. NaN stays NaN, also where both hold it. Raises
    `RunError` where token ids, heads or positions do not match, for then rows do not correspond, or
    if there is nothing in common.
    """
    shared_sites = list(sites) if sites else [s for s in first.sites if s in second.sites]
    layers = [layer for layer in first.layers if layer in second.layers]
    ids = _shared_prompts(first, second) if prompts is None else [_id(first, p) for p in prompts]
    if not (shared_sites and layers and ids):
        raise RunError(
            f"{first.url} and {second.url} have no stored prompt, site and layer in common"
        )
    rows: list[dict[str, Any]] = []
    for site in shared_sites:
        most, total, scale, values = (np.zeros(len(layers)) for _ in range(4))
        counted = 0
        for prompt in ids:
            _check_tokens(first, second, prompt)
            a, b = (
                run.read(site, prompt=prompt, layer=layers, dtype="float32")
                for run in (first, second)
            )
            _check_labels(a, b, f"{site} of {prompt!r}", first, second)
            gap, is_counted = _gaps(a.values, b.values, is_scores=a.name == SCORES)
            axes = tuple(range(1, gap.ndim))
            np.maximum(most, gap.max(axis=axes, initial=0), out=most)
            held = np.where(is_counted, np.abs(a.values), 0)
            np.maximum(scale, held.max(axis=axes, initial=0), out=scale)
            total += gap.sum(axis=axes, dtype=np.float64)
            values += np.count_nonzero(is_counted, axis=axes)
            counted += gap.shape[2]
        for place, layer in enumerate(layers):
            rows.append(
                {
                    "site": site,
                    "layer": layer,
                    "rows": counted,
                    "max": float(most[place]),
                    "mean": float(total[place] / max(values[place], 1)),
                    "scale": float(scale[place]),
                }
            )
    return pa.Table.from_pylist(rows)


def _gaps(
    a: NDArray[np.float32], b: NDArray[np.float32], *, is_scores: bool
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return absolute differences, 0 between equal infinities, and which entries count."""
    is_counted = np.ones(a.shape, bool)
    if is_scores:
        is_counted = ~(np.isneginf(a) & np.isneginf(b))
    is_same = a == b
    gap = np.zeros_like(a)
    np.subtract(a, b, out=gap, where=~is_same)
    return np.abs(gap), is_counted


def _shared_prompts(first: Run, second: Run) -> list[str]:
    also = set(_stored(second))
    return [prompt for prompt in _stored(first) if prompt in also]


def _stored(run: Run) -> list[str]:
    table = run.prompts
    ids: list[str] = table.filter(pc.equal(table["status"], "stored"))["prompt_id"].to_pylist()
    return ids


def _id(run: Run, prompt: Prompt) -> str:
    return run.tokens(prompt).prompt


def _check_labels(a: xr.DataArray, b: xr.DataArray, what: str, first: Run, second: Run) -> None:
    if a.dims != b.dims or a.shape[-1] != b.shape[-1]:
        raise RunError(
            f"{what} is {dict(a.sizes)} in {first.url} and {dict(b.sizes)} in {second.url}"
        )
    for dim in a.coords.keys() & set(a.dims):
        if not np.array_equal(a[dim], b[dim]):
            raise RunError(
                f"{what} has {dim} {describe(a[dim].values)} in {first.url} and "
                f"{describe(b[dim].values)} in {second.url}: take what both hold"
            )


def _check_tokens(first: Run, second: Run, prompt: str) -> None:
    a, b = first.tokens(prompt).ids, second.tokens(prompt).ids
    if not np.array_equal(a, b):
        raise RunError(
            f"prompt {prompt!r} has other tokens in {second.url} than in {first.url} "
            f"({len(b)} and {len(a)}): their rows do not correspond"
        )
