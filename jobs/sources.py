"""Prompt sources: files anywhere fsspec reaches, as a stream of records in a fixed order.

Knows file formats and compression; knows nothing of tokens, models or runs. Files of a glob are
read in the order of their names, so the same files give the same prompts in the same order. Nothing
is held beyond one file's current block, except for `json`, whose array is parsed as a whole.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.config import PromptsConfig, SourceFormat
from jobs.errors import SourceError
from store.byte_count import human_bytes

_BLOCK_BYTES = 1 << 20
_MAX_JSON_BYTES = 1 << 30
_STAMPS = ("ETag", "etag", "md5Hash", "mtime", "LastModified")
_MAX_FIELD_CHARACTERS = 1 << 30
_COMPRESSED = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_BY_SUFFIX = {
    ".jsonl": SourceFormat.JSONL,
    ".ndjson": SourceFormat.JSONL,
    ".json": SourceFormat.JSON,
    ".csv": SourceFormat.CSV,
    ".parquet": SourceFormat.PARQUET,
    ".pq": SourceFormat.PARQUET,
    ".txt": SourceFormat.TEXT,
    ".text": SourceFormat.TEXT,
    ".arrow": SourceFormat.HF_DATASET,
}


def _zstd_error() -> type[Exception]:
    """zstandard is there where runs are made, not where they are only read."""
    try:
        from zstandard import ZstdError
    except ImportError:
        return ValueError
    return ZstdError  # type: ignore[no-any-return, unused-ignore]


_READ_ERRORS = (
    OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error, lzma.LZMAError,
    pa.ArrowException, _zstd_error(),
)  # fmt: skip
"""What readers and decompressors raise for files that are not what they should be."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source. `stamp` changes whenever the back end thinks the file did."""

    url: str
    bytes: int
    stamp: str


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """One record as read, and where it stood (`file:number`, from 1)."""

    row: Mapping[str, Any]
    where: str


class PromptSource:
    """The files behind `prompts.source`; opening it lists them and reads none."""

    def __init__(self, config: PromptsConfig) -> None:
        self._config = config
        self._fs, path = _file_system(config)
        self.files = self._list(path)

    def records(self) -> Iterator[SourceRecord]:
        """Yield every record in order. Raises `SourceError` naming file and place."""
        for file in self.files:
            kind = self._format_of(file.url)
            try:
                for number, row in enumerate(self._read(file.url, kind), start=1):
                    yield SourceRecord(row, f"{file.url}:{number}")
            except _READ_ERRORS as error:
                if isinstance(error, SourceError):
                    raise
                raise SourceError(f"cannot read {file.url} as {kind}: {error}") from error

    def sha256(self, file: SourceFile) -> str:
        """Return the SHA-256 of a file's stored bytes; reads it once."""
        digest = hashlib.sha256()
        with self._fs.open(file.url, "rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()

    def _list(self, path: str) -> list[SourceFile]:
        source = self._config.source
        try:
            if self._fs.isdir(path):
                found = self._readable(self._fs.find(path))
            elif any(sign in path for sign in "*?["):
                found = [name for name in self._fs.glob(path) if self._fs.isfile(name)]
            else:
                found = [path] if self._fs.exists(path) else []
            files = [self._describe(name) for name in sorted(found)]
        except OSError as error:
            raise SourceError(f"cannot list the prompt source {source!r}: {error}") from error
        if not files:
            raise SourceError(f"the prompt source {source!r} names no file; check prompts.source")
        return files

    def _describe(self, name: str) -> SourceFile:
        info = self._fs.info(name)
        stamp = next((str(info[key]) for key in _STAMPS if info.get(key)), "")
        return SourceFile(url=name, bytes=int(info.get("size") or 0), stamp=stamp)

    def _readable(self, names: Sequence[str]) -> list[str]:
        """The prompt files of a folder. Beside Arrow files, JSON files describe the data set."""
        arrow = [name for name in names if name.endswith(".arrow")]
        if self._config.format is SourceFormat.HF_DATASET or (
            self._config.format is SourceFormat.AUTO and arrow
        ):
            return arrow
        auto = self._config.format is SourceFormat.AUTO
        return [name for name in names if not auto or _suffix(name) in _BY_SUFFIX]

    def _format_of(self, name: str) -> SourceFormat:
        if self._config.format is not SourceFormat.AUTO:
            return self._config.format
        kind = _BY_SUFFIX.get(_suffix(name))
        if kind is None:
            known = ", ".join(sorted(_BY_SUFFIX))
            raise SourceError(
                f"{name}: unknown kind of file; known are {known}; or set prompts.format"
            )
        return kind

    def _read(self, name: str, kind: SourceFormat) -> Iterator[Mapping[str, Any]]:
        if kind is SourceFormat.PARQUET:
            with self._fs.open(name, "rb") as stream:
                for batch in pq.ParquetFile(stream).iter_batches(batch_size=4096):
                    yield from batch.to_pylist()
            return
        if kind is SourceFormat.HF_DATASET:
            with self._fs.open(name, "rb") as stream:
                yield from _arrow_rows(stream)
            return
        with self._fs.open(name, "rb", compression="infer") as raw:
            # CSV tells its rows' ends itself; elsewhere a carriage return alone ends no line.
            newline = "\n" if kind in (SourceFormat.JSONL, SourceFormat.TEXT) else ""
            text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline=newline)
            if kind is SourceFormat.JSONL:
                yield from _jsonl_rows(text, name)
            elif kind is SourceFormat.CSV:
                csv.field_size_limit(_MAX_FIELD_CHARACTERS)  # 128 KiB otherwise
                yield from csv.DictReader(text, strict=True)
            elif kind is SourceFormat.TEXT:
                for line in text:
                    yield {self._config.text_column: line.removesuffix("\n").removesuffix("\r")}
            else:
                yield from _json_rows(text, name)


def _file_system(config: PromptsConfig) -> tuple[Any, str]:
    try:
        fs, path = fsspec.core.url_to_fs(config.source, **config.options)
    except (ValueError, ImportError, OSError) as error:
        raise SourceError(f"cannot open the prompt source {config.source!r}: {error}") from error
    return fs, str(path)


def _suffix(name: str) -> str:
    base = name.rsplit("/", 1)[-1].lower()
    for suffix in _COMPRESSED:
        base = base.removesuffix(suffix)
    return f".{base.rsplit('.', 1)[-1]}" if "." in base else ""


def _jsonl_rows(text: io.TextIOWrapper, name: str) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(text, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{name}, line {number}: not readable as JSON ({error})") from error
        yield _mapping(row, f"{name}, line {number}")


def _json_rows(text: io.TextIOWrapper, name: str) -> Iterator[Mapping[str, Any]]:
    data = text.read(_MAX_JSON_BYTES + 1)
    if len(data) > _MAX_JSON_BYTES:
        raise SourceError(
            f"{name}: more than {human_bytes(_MAX_JSON_BYTES)} in one JSON array; use JSONL or "
            "Parquet"
        )
    rows = json.loads(data)
    if not isinstance(rows, list):
        raise SourceError(f"{name}: a JSON source must be one array of objects")
    for number, row in enumerate(rows, start=1):
        yield _mapping(row, f"{name}, record {number}")


def _mapping(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise SourceError(f"{where}: expected an object, got {type(row).__name__}")
    return row


def _arrow_rows(stream: Any) -> Iterator[Mapping[str, Any]]:
    """Hugging Face keeps a dataset on disk as Arrow streams; older caches use the file form."""
    if stream.read(6) == b"ARROW1":
        stream.seek(0)
        reader = pa.ipc.open_file(stream)
        batches = (reader.get_batch(place) for place in range(reader.num_record_batches))
    else:
        stream.seek(0)
        batches = iter(pa.ipc.open_stream(stream))
    for batch in batches:
        yield from batch.to_pylist()
