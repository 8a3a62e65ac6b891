"""The output projections W_O of a run's layers: stored once per run, read to attribute heads.

A head's contribution to the residual stream is its slice of z through its slice of W_O (Elhage et
al. 2021, "A Mathematical Framework for Transformer Circuits"). `model.json` and the data never
depend on this: a run without it reads the same, only `contribution` refuses.

Each layer is one object `weights/w_o-<layer>.safetensors`, created once and replaced only where it
is of another run, layer or shape: a tensor `w_o` [num_heads * v_head_size, hidden_size] in the
engine's dtype (rows in global head order), a tensor `bias` [hidden_size] after it where the
projection has one, and the run, the layer and a crc32c of both tensors' bytes in the header's
metadata. Knows no torch and no engine.

Legend: H heads, D head size of v and z, M hidden size, P positions.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from store.checksum import crc32c, hex_crc32c
from store.codec import DTYPES
from store.errors import DamagedObject, ObjectExists, ObjectNotFound, SiteNotFound
from store.objects.protocol import ByteRange, ObjectStore
from store.run_format import LayerSemantics, ModelManifest

WEIGHTS = "weights/"
MAX_WEIGHT_BYTES = 4 << 30
MAX_HEADER_BYTES = 1 << 16
_FACTS = {"crc32c", "heads", "layer", "run_id"}
_NO_CRC = "0" * 8

_TYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class OutputProjection:
    """One layer's W_O, [H, D, M]: what head h adds to the residual is z[h] @ w_o_HDM[h].

    The attention block's output is the sum of that over all heads, plus `bias_M` if there is one.
    """

    layer: int
    w_o_HDM: NDArray[Any]  # noqa: N815
    bias_M: NDArray[Any] | None = None  # noqa: N815


def weight_key(layer: int) -> str:
    """Return the name of a layer's W_O in its run."""
    return f"{WEIGHTS}w_o-{layer:05d}.safetensors"


def write_output_projection(
    objects: ObjectStore, projection: OutputProjection, run_id: str
) -> None:
    """Store a layer's W_O of the run if it is not there yet. Safe to repeat and to race.

    What has its name, and is not of this run, layer, shape and type, is replaced.
    """
    heads, size, hidden = projection.w_o_HDM.shape
    values = np.ascontiguousarray(projection.w_o_HDM).reshape(heads * size, hidden)
    data = values.tobytes()
    has_bias = projection.bias_M is not None
    if projection.bias_M is not None:
        data += np.ascontiguousarray(projection.bias_M, values.dtype).reshape(hidden).tobytes()
    name = weight_key(projection.layer)
    facts = _facts(projection.layer, heads, run_id, hex_crc32c(crc32c(data)))
    head = _head(facts, values.dtype, (heads * size, hidden), has_bias=has_bias)
    try:
        objects.create(name, head + data)
    except ObjectExists:
        due = _facts(projection.layer, heads, run_id)
        if not _is_of(objects, name, objects.size(name), due, values.dtype, (heads * size, hidden)):
            objects.put(name, [head, data])


def layers_to_store(
    objects: ObjectStore, layers: Sequence[LayerSemantics], model: ModelManifest
) -> list[LayerSemantics]:
    """Return those of a run's layers whose W_O is not there, or not of this run, layer and shape.

    Costs a listing and one small read a layer. An earlier run's W_O that names no run counts as
    not there, since nothing but its values could tell whose it is.
    """
    held = {info.name: info.bytes for info in objects.list(WEIGHTS)}
    found = []
    for layer in layers:
        name = weight_key(layer.layer)
        due = _facts(layer.layer, layer.num_heads, model.run_id)
        shape = (layer.num_heads * layer.v_head_size, model.hidden_size)
        dtype = DTYPES[model.dtype]
        if name not in held or not _is_of(objects, name, held[name], due, dtype, shape):
            found.append(layer)
    return found


def _is_of(
    objects: ObjectStore,
    name: str,
    num_bytes: int,
    facts: dict[str, str],
    dtype: np.dtype[Any],
    shape: tuple[int, int],
) -> bool:
    """Whether a stored W_O is of this size and says this of itself, but for its checksum."""
    for has_bias in (False, True):
        due = _head(facts, dtype, shape, has_bias=has_bias)
        if num_bytes == len(due) + (shape[0] + has_bias) * shape[1] * dtype.itemsize:
            (head,) = objects.get_ranges(name, [ByteRange(0, len(due))])
            at = due.index(_NO_CRC.encode())
            if head[:at] + due[at : at + len(_NO_CRC)] + head[at + len(_NO_CRC) :] == due:
                return True
    return False


def _facts(layer: int, heads: int, run_id: str, checksum: str = "") -> dict[str, str]:
    return {
        "crc32c": checksum or _NO_CRC,
        "heads": str(heads),
        "layer": str(layer),
        "run_id": run_id,
    }


def _head(
    facts: dict[str, str], dtype: np.dtype[Any], shape: tuple[int, int], *, has_bias: bool
) -> bytes:
    """Return the safetensors header, its length before it: one form for each content."""
    end = math.prod(shape) * dtype.itemsize
    header = {"__metadata__": facts, "w_o": _entry(dtype, shape, 0, end)}
    if has_bias:
        header["bias"] = _entry(dtype, shape[1:], end, end + shape[1] * dtype.itemsize)
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def stored_bytes(layer: LayerSemantics, model: ModelManifest) -> tuple[int, ...]:
    """Return the sizes that a stored W_O of this layer may have: with a bias or without one.

    Earlier runs do not name the run in it, the first ones not the layer, which makes them shorter.
    """
    dtype = DTYPES[model.dtype]
    shape = (layer.num_heads * layer.v_head_size, model.hidden_size)
    whole = _facts(layer.layer, layer.num_heads, model.run_id)
    named = {fact: whole[fact] for fact in ("crc32c", "heads", "layer")}
    first = {fact: whole[fact] for fact in ("crc32c", "heads")}
    return tuple(
        len(_head(facts, dtype, shape, has_bias=has_bias))
        + (shape[0] + has_bias) * shape[1] * dtype.itemsize
        for has_bias in (False, True)
        for facts in (whole, named, first)
    )


def projection_contradiction(
    projection: OutputProjection, layer: LayerSemantics, model: ModelManifest
) -> str | None:
    """Return how a layer's W_O contradicts what `model.json` says of the layer, or None."""
    found = (*projection.w_o_HDM.shape, str(projection.w_o_HDM.dtype))
    due = (layer.num_heads, layer.v_head_size, model.hidden_size, model.dtype)
    return None if found == due else f"holds {found}, the model's layer {layer.layer} has {due}"


def _entry(dtype: np.dtype[Any], shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}


def read_output_projection(
    objects: ObjectStore, layer: int, run_id: str | None
) -> OutputProjection:
    """Return a layer's W_O. Raises `SiteNotFound` if the run has none, `DamagedObject`.

    Also where it says that it is of another run than `run_id`; None where no `run.json` tells.
    """
    name = weight_key(layer)
    try:
        data = objects.get(name, max_bytes=MAX_WEIGHT_BYTES)
    except ObjectNotFound as error:
        raise SiteNotFound(
            f"the run holds no W_O of layer {layer} ({name}), so contributions cannot be told; "
            "capture with an attnstore that stores it"
        ) from error
    return _decode(data, layer, run_id, name)


def _decode(data: bytes, layer: int, run_id: str | None, name: str) -> OutputProjection:
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(data[8 : 8 + length])
        facts = header["__metadata__"]
        heads = int(facts["heads"])
        entry = header["w_o"]
        dtype, (rows, hidden) = _TYPES[entry["dtype"]], map(int, entry["shape"])
        has_bias = "bias" in header
        values = memoryview(data)[8 + length :]
        w_o_bytes = rows * hidden * dtype.itemsize
        if heads < 1 or rows % heads or w_o_bytes < 0 or hidden < 1:
            raise ValueError(f"{heads} heads in {rows} x {hidden} {entry['dtype']}")
        if len(values) != w_o_bytes + has_bias * hidden * dtype.itemsize:
            raise ValueError(f"{len(values)} bytes for {rows} x {hidden} {entry['dtype']}")
        due = _head(facts, dtype, (rows, hidden), has_bias=has_bias)
        if set(facts) - _FACTS or data[: 8 + length] != due:
            raise ValueError("a header that is not in the form of what it says")
        stated, actual = facts["crc32c"], hex_crc32c(crc32c(values))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise DamagedObject(f"{name} is not readable ({error}); run `attnstore verify`") from error
    if facts.get("layer", str(layer)) != str(layer):
        raise DamagedObject(f"{name} is W_O of layer {facts['layer']}; run `attnstore verify`")
    if run_id is not None and facts.get("run_id", run_id) != run_id:
        raise DamagedObject(
            f"{name} belongs to run {facts['run_id']}, not {run_id}; run `attnstore verify`"
        )
    if stated != actual:
        raise DamagedObject(
            f"{name}: its crc32c says {stated}, its bytes give {actual}; run `attnstore verify`"
        )
    w_o_HDM = np.frombuffer(values[:w_o_bytes], dtype).reshape(heads, rows // heads, hidden)
    bias_M = np.frombuffer(values[w_o_bytes:], dtype) if has_bias else None
    return OutputProjection(layer, w_o_HDM, bias_M)


def contributions(z_HPD: NDArray[Any], w_o_HDM: NDArray[Any]) -> NDArray[np.float32]:
    """Return each head's addition to the residual stream, float32 [H, P, M], without W_O's bias."""
    if z_HPD.shape[0] != w_o_HDM.shape[0] or z_HPD.shape[2] != w_o_HDM.shape[1]:
        raise ValueError(f"z {z_HPD.shape} does not fit W_O {w_o_HDM.shape}")
    if math.prod(z_HPD.shape) == 0:
        return np.zeros((*z_HPD.shape[:2], w_o_HDM.shape[2]), np.float32)
    return np.asarray(z_HPD, np.float32) @ np.asarray(w_o_HDM, np.float32)
