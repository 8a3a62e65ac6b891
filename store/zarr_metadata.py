"""The zarr.json of an attempt: a second way in for any Zarr v3 library. Pure; writes nothing.

Our own reader takes everything from the commit and never needs these. The fill value of floating
sites is NaN, so a shard that is missing shows as NaN and never as plausible zeros in a library that
fills missing chunks silently.
"""

from __future__ import annotations

import json
from typing import Any

from store import keys
from store.codec import blosc_configuration
from store.errors import FormatError
from store.packed_pattern import UINT8_STEPS, UINT8_WORST_ERROR
from store.run_format import ArrayRecord, Commit

_LITTLE: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
_BINDING = (
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs",
    "dimension_names", "fill_value",
)  # fmt: skip
_CRC32C: dict[str, Any] = {"name": "crc32c"}


def group_metadata(*, run_id: str, unit: int, attempt: str) -> bytes:
    """Return the zarr.json of an attempt's group."""
    return _to_json(
        {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {"run_id": run_id, "unit": unit, "attempt": attempt},
        }
    )


def array_metadata(record: ArrayRecord, *, run_id: str, unit: int) -> bytes:
    """Return the zarr.json of one site's array."""
    geometry = record.geometry()
    packed = record.is_packed
    tokens, heads, size = geometry.num_tokens, geometry.num_heads, geometry.head_size
    shape = [geometry.num_layers, tokens, heads, size]
    shard = [1, geometry.shard_tokens, geometry.shard_heads, size]
    chunk = [1, geometry.chunk_tokens, geometry.group_heads, size]
    if packed:
        shape, shard, chunk = ([sizes[0], sizes[2], sizes[1]] for sizes in (shape, shard, chunk))
    codecs: list[dict[str, Any]] = []
    if not packed:
        codecs.append({"name": "transpose", "configuration": {"order": [0, 2, 1, 3]}})
    codecs.append(_LITTLE if record.item_bytes > 1 else {"name": "bytes"})
    blosc = blosc_configuration(record.codec, record.item_bytes, geometry.chunk_bytes)
    if blosc is not None:
        codecs.append({"name": "blosc", "configuration": blosc})
    codecs.append(_CRC32C)
    sharding = {
        "chunk_shape": chunk,
        "codecs": codecs,
        "index_codecs": [_LITTLE, _CRC32C],
        "index_location": "end",
    }
    attributes: dict[str, Any] = {
        "run_id": run_id,
        "unit": unit,
        "site": record.site,
        "layers": list(record.layers),
        "heads": list(record.heads),
    }
    if record.dtype == "uint8":
        attributes |= {"scale": 1 / UINT8_STEPS, "worst_error": UINT8_WORST_ERROR}
    return _to_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": record.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0 if record.dtype == "uint8" else "NaN",
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "dimension_names": list(record.dims),
            "attributes": attributes,
        }
    )


def metadata_problem(data: bytes, commit: Commit, name: str) -> str | None:
    """Return what in a zarr.json of an attempt contradicts its commit, or None.

    A library that follows it would then read other values than this format's own reader, or take
    them for those of other layers or heads. `name` is relative to the attempt; objects that are no
    zarr.json contradict nothing here.
    """
    arrays = {keys.array_metadata_key(array.site): array for array in commit.arrays}
    run_id, unit = commit.run_id, commit.unit
    try:
        if name == keys.GROUP_METADATA:
            due = group_metadata(run_id=run_id, unit=unit, attempt=commit.attempt)
        elif name in arrays:
            due = array_metadata(arrays[name], run_id=run_id, unit=unit)
        else:
            return None
        expected: dict[str, Any] = json.loads(due)
        found = json.loads(data)
        wrong = [key for key in expected if key in _BINDING and found[key] != expected[key]]
        stated = found["attributes"]
        wrong += [key for key, value in expected["attributes"].items() if stated[key] != value]
    except FormatError as error:
        return str(error)
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        return f"{name} is no Zarr metadata of this commit ({error})"
    return f"{name} has another {' and '.join(wrong)} than the commit" if wrong else None


def _to_json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
