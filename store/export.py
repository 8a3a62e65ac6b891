"""Chosen prompts and sites of a run as files of another kind: numpy, safetensors, Zarr, datasets.

Knows a run through its public calls; each exporter holds one prompt at a time. File names are made
of row numbers, never of prompt ids, which anyone may have written. An export that is already there
is refused, so nothing is ever half old and half new; one that fails takes its folder away, and one
that was killed lacks its `export.json`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xarray as xr
from numpy.typing import DTypeLike

from store.errors import ExportRefused, PackageMissing, RunError
from store.new_folder import new_folder
from store.selection import Choice, integer
from store.site_names import EXPORT_NAMES, REBUILT, resolve

if TYPE_CHECKING:
    from store.prompt_names import Prompt
    from store.run import Run

PROMPTS_FILE = "prompts.parquet"
MANIFEST = "export.json"
MAX_ROW_VALUES = (1 << 31) - 1
"""What the 32-bit offsets of Arrow's lists can count, and `datasets` reads no others."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SAFETENSORS_TYPES = {
    _BFLOAT16: "BF16",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
    np.dtype(np.float64): "F64",
    np.dtype(np.bool_): "BOOL",
    np.dtype(np.int8): "I8",
    np.dtype(np.int16): "I16",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.uint8): "U8",
    np.dtype(np.uint16): "U16",
    np.dtype(np.uint32): "U32",
    np.dtype(np.uint64): "U64",
}


class ExportKind(StrEnum):
    """What a run can be exported to."""

    NUMPY = "numpy"
    SAFETENSORS = "safetensors"
    ZARR = "zarr"
    HF_DATASET = "hf-dataset"
    ICECHUNK = "icechunk"


@dataclass(frozen=True, slots=True)
class ExportSelection:
    """Which part of a run is exported; None is everything that is stored."""

    sites: Sequence[str] | None = None
    prompts: Sequence[Prompt] | None = None
    layers: Choice = None
    heads: Choice = None
    pos: Choice = None
    dtype: DTypeLike | None = None


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written where."""

    kind: ExportKind
    path: Path
    prompts: int
    bytes: int


def export(
    run: Run, kind: ExportKind | str, path: str | Path, selection: ExportSelection | None = None
) -> ExportReport:
    """Write a part of a run to the new folder `path`.

    `numpy`: one `.npz` a prompt (bfloat16 as float32, which holds it exactly, since `.npz` cannot
    name the type). `safetensors`: one file a prompt, bits kept. `zarr`, `icechunk`: one Zarr v3
    group, each site `[layer, row, head|kv_head, d_head]` beside `prompt` and `pos` of every row.
    `hf-dataset`: Parquet of one row a prompt, for `datasets.load_dataset(f"{path}/dataset")`. All
    come with the prompts table as Parquet and `export.json`, written last. An export that fails
    leaves no folder that was not there. Raises `ExportRefused` if `path` is there, the kind
    unknown, or a site or type has no place in it; `PackageMissing` naming what to install.
    """
    kind = _kind(kind)
    target = Path(path)
    chosen = selection or ExportSelection()
    part = _Part(run, chosen)
    part.check(kind)
    if target.exists():
        raise ExportRefused(f"{target} is already there; export to a new folder")
    with new_folder(target):
        _WRITERS[kind](part, target)
        pq.write_table(part.prompts_table(), target / PROMPTS_FILE)
        body = {"kind": kind.value, "run": run.id, "sites": part.sites, "prompts": len(part.ids)}
        (target / MANIFEST).write_text(json.dumps(body, indent=1) + "\n")
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return ExportReport(kind, target, len(part.ids), size)


class _Part:
    """The chosen part of a run, prompt by prompt."""

    def __init__(self, run: Run, selection: ExportSelection) -> None:
        self.run = run
        self.selection = selection
        self.sites = [str(site) for site in selection.sites or run.sites]
        table = self._table = run.prompts
        if selection.prompts is None:
            stored = table.filter(pc.equal(table["status"], "stored"))
            self.ids: list[str] = stored["prompt_id"].to_pylist()
        else:
            self.ids = [run.tokens(prompt).prompt for prompt in selection.prompts]
        if not self.ids:
            raise RunError(f"{run.url} has no stored prompt to export")

    def check(self, kind: ExportKind) -> None:
        """Refuse what the kind has no place for. Raises `ExportRefused`, or `SiteNotFound`."""
        if isinstance(self.selection.sites, str):
            raise ExportRefused(f"sites={self.selection.sites!r}: give a list of sites")
        taken = EXPORT_NAMES[kind.value]
        if kind is ExportKind.HF_DATASET:
            taken |= set(self.run.prompts.column_names)
        for site in self.sites:
            named = resolve(site, self.run.sites)
            if site in taken:
                raise ExportRefused(
                    f"{kind} cannot hold the site {site!r} beside what it calls {site} itself; "
                    "name other sites, or export to another kind"
                )
            if kind not in (ExportKind.ZARR, ExportKind.ICECHUNK):
                continue
            if named.site in REBUILT:
                raise ExportRefused(
                    f"{kind} holds one row a token, which {named.site} is not; name other sites, "
                    f"or export it to {ExportKind.NUMPY}, {ExportKind.SAFETENSORS} or "
                    f"{ExportKind.HF_DATASET}"
                )
            if named.layer is not None:
                raise ExportRefused(
                    f"{site!r} names one layer, and {kind} holds whole sites; "
                    f"give {named.site!r}, and the layers besides it"
                )
        if self.selection.dtype is None:
            return
        try:
            dtype = np.dtype(self.selection.dtype)
        except TypeError as error:
            raise ExportRefused(f"dtype={self.selection.dtype!r}: {error}") from None
        if dtype.kind not in "iufb" and dtype not in (_BFLOAT16, *_SAFETENSORS_TYPES):
            raise ExportRefused(f"{kind} has no place for dtype {dtype}; give a real number type")
        if kind is ExportKind.SAFETENSORS and dtype not in _SAFETENSORS_TYPES:
            known = ", ".join(str(one) for one in _SAFETENSORS_TYPES)
            raise ExportRefused(f"{kind} has no dtype {dtype}; it has {known}")

    def arrays(self, prompt: str) -> dict[str, xr.DataArray]:
        """Return each site of one prompt, every axis kept."""
        chosen = self.selection
        return {
            site: self.run.read(
                site,
                prompt=prompt,
                layer=_listed(chosen.layers),
                head=_listed(chosen.heads),
                pos=_listed(chosen.pos),
                dtype=chosen.dtype,
            )
            for site in self.sites
        }

    def prompts_table(self) -> pa.Table:
        """Return the exported prompts, in order, with the name of each one's file."""
        table = self._table
        places = pc.index_in(pa.array(self.ids), value_set=table["prompt_id"])
        names = pa.array([file_stem(i) for i in range(len(self.ids))], pa.string())
        return table.take(places).append_column("file", names)


def file_stem(number: int) -> str:
    """Return the name, without its ending, of the exported prompt's file of this number."""
    return f"prompt-{number:08d}"


def safetensors_bytes(arrays: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str]) -> bytes:
    """Return a safetensors file: header length (u64), JSON header, the arrays back to back."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, values in arrays.items():
        header[name] = {
            "dtype": _SAFETENSORS_TYPES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    parts = [np.ascontiguousarray(values).tobytes() for values in arrays.values()]
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def _write_numpy(part: _Part, target: Path) -> None:
    for number, prompt in enumerate(part.ids):
        arrays: dict[str, Any] = {"token_ids": part.run.tokens(prompt).ids}
        for site, array in part.arrays(prompt).items():
            arrays[site] = _npz_values(array)
        np.savez(target / f"{file_stem(number)}.npz", **arrays)


def _write_safetensors(part: _Part, target: Path) -> None:
    for number, prompt in enumerate(part.ids):
        arrays: dict[str, np.ndarray[Any, Any]] = {"token_ids": part.run.tokens(prompt).ids}
        metadata = {"prompt_id": prompt, "run": part.run.id}
        for site, array in part.arrays(prompt).items():
            arrays[site] = array.values
            metadata[f"{site}.dims"] = " ".join(map(str, array.dims))
        data = safetensors_bytes(arrays, metadata)
        (target / f"{file_stem(number)}.safetensors").write_bytes(data)


def _write_zarr(part: _Part, target: Path) -> None:
    _write_group(part, str(target / "data.zarr"))


def _write_icechunk(part: _Part, target: Path) -> None:
    icechunk = _needed("icechunk")
    repository = icechunk.Repository.create(
        icechunk.local_filesystem_storage(str(target / "data.icechunk"))
    )
    session = repository.writable_session("main")
    _write_group(part, session.store)
    session.commit(f"export of run {part.run.id}")


def _write_group(part: _Part, place: Any) -> None:
    """Write one Zarr v3 group, appending the rows of one prompt after the other."""
    import zarr

    import store.zarr_bfloat16  # noqa: F401

    group: Any = zarr.create_group(place, zarr_format=3, attributes={"run": part.run.id})
    start = 0
    for number, prompt in enumerate(part.ids):
        arrays = part.arrays(prompt)
        length = 0
        for site, array in arrays.items():
            rows = array.transpose("layer", array.dims[2], array.dims[1], ...)
            length = rows.shape[1]
            if number == 0:
                _create_array(group, site, rows)
            held = group[site]
            held.resize((held.shape[0], start + length, *held.shape[2:]))
            held[:, start : start + length] = rows.values
        for name, values in (
            ("prompt", np.full(length, number, np.int64)),
            ("pos", next(iter(arrays.values()))["pos"].values),
        ):
            if number == 0:
                group.create_array(
                    name, shape=(0,), chunks=(65536,), dtype="int64", dimension_names=("row",)
                )
            group[name].append(values)
        start += length


def _create_array(group: Any, site: str, rows: xr.DataArray) -> None:
    layers, _, heads, size = rows.shape
    dims = ("layer", "row", str(rows.dims[2]), "d_head")
    group.create_array(
        site,
        shape=(layers, 0, heads, size),
        chunks=(1, 1024, heads, size),
        dtype="bfloat16" if rows.dtype == _BFLOAT16 else rows.dtype,
        dimension_names=dims,
        attributes={
            "layers": rows["layer"].values.tolist(),
            "heads": rows[dims[2]].values.tolist(),
        },
    )


def _write_dataset(part: _Part, target: Path) -> None:
    """Write Parquet that `datasets.load_dataset` reads, a row group a prompt."""
    table = part.prompts_table().drop_columns(["file"])
    folder = target / "dataset"
    folder.mkdir()
    writer: pq.ParquetWriter | None = None
    try:
        for place, prompt in enumerate(part.ids):
            tokens = part.run.tokens(prompt)
            row = table.slice(place, 1)
            row = row.append_column("token_ids", nested_row(tokens.ids))
            row = row.append_column("tokens", pa.array([list(tokens.strings)]))
            for site, array in part.arrays(prompt).items():
                row = row.append_column(site, nested_row(_npz_values(array)))
            writer = writer or pq.ParquetWriter(folder / "train.parquet", row.schema)
            writer.write_table(row)
    finally:
        if writer is not None:
            writer.close()


def nested_row(values: np.ndarray[Any, Any]) -> pa.Array:
    """Return an array as one row of nested lists, without going through Python numbers.

    Raises `ExportRefused` where it has more values than the offsets of a list can count.
    """
    if values.size > MAX_ROW_VALUES:
        raise ExportRefused(
            f"an array of {values.shape} has {values.size} values, and a row of a dataset takes "
            f"{MAX_ROW_VALUES}: pick fewer layers, heads or positions, or export to another kind"
        )
    nested = pa.array(np.ascontiguousarray(values).ravel())
    for axis in range(values.ndim - 1, -1, -1):
        lists = math.prod(values.shape[:axis])
        offsets = np.arange(lists + 1, dtype=np.int32) * values.shape[axis]
        nested = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), nested)
    return nested


def _npz_values(array: xr.DataArray) -> np.ndarray[Any, Any]:
    if array.dtype == _BFLOAT16:
        return np.asarray(array.values, np.float32)
    return np.asarray(array.values)


def _listed(choice: Choice) -> Choice:
    """Return a selection that keeps its axis: a scalar as a list of one."""
    whole = integer(choice)
    return choice if whole is None else [whole]


def _needed(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PackageMissing(
            f"this export needs {module}: pip install 'attnstore[export]'"
        ) from error


def _kind(kind: ExportKind | str) -> ExportKind:
    try:
        return ExportKind(kind)
    except ValueError:
        kinds = ", ".join(ExportKind)
        raise ExportRefused(f"there is no export to {kind!r}; there are {kinds}") from None


_WRITERS: dict[ExportKind, Callable[[_Part, Path], None]] = {
    ExportKind.NUMPY: _write_numpy,
    ExportKind.SAFETENSORS: _write_safetensors,
    ExportKind.ZARR: _write_zarr,
    ExportKind.HF_DATASET: _write_dataset,
    ExportKind.ICECHUNK: _write_icechunk,
}
