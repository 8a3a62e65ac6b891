"""The output projections W_O of a run's layers: stored once per run, read to attribute heads.

A head's contribution to the residual stream is its slice of z through its slice of W_O (Elhage et
al. 2021, "A Mathematical Framework for Transformer Circuits"). `model.json` and the data never
depend on this: a run without it reads the same, only `contribution` refuses.

Each layer is one object `weights/w_o-<layer>.safetensors`, create-only: a tensor `w_o`
[num_heads * v_head_size, hidden_size] in the engine's dtype (rows in global head order), a tensor
`bias` [hidden_size] after it where the projection has one, and a crc32c of both tensors' bytes in
the header's metadata. Knows no torch and no engine.

Legend: H heads, D head size of v and z, M hidden size, P positions.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from store.checksum import crc32c, hex_crc32c
from store.errors import DamagedObject, ObjectExists, ObjectNotFound, SiteNotFound
from store.objects.protocol import ObjectStore

WEIGHTS = "weights/"
MAX_WEIGHT_BYTES = 4 << 30
MAX_HEADER_BYTES = 1 << 16

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


def write_output_projection(objects: ObjectStore, projection: OutputProjection) -> None:
    """Store a layer's W_O if it is not there yet. Safe to repeat and to race."""
    heads, size, hidden = projection.w_o_HDM.shape
    values = np.ascontiguousarray(projection.w_o_HDM).reshape(heads * size, hidden)
    data = values.tobytes()
    header: dict[str, Any] = {
        "w_o": _entry(values, 0),
    }
    if projection.bias_M is not None:
        bias = np.ascontiguousarray(projection.bias_M, values.dtype).reshape(hidden)
        header["bias"] = _entry(bias, len(data))
        data += bias.tobytes()
    header |= {
        "__metadata__": {"crc32c": hex_crc32c(crc32c(data)), "heads": str(heads)},
    }
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    try:
        objects.create(weight_key(projection.layer), struct.pack("<Q", len(text)) + text + data)
    except ObjectExists:
        return


def _entry(values: NDArray[Any], start: int) -> dict[str, Any]:
    return {
        "dtype": _NAMES[values.dtype],
        "shape": list(values.shape),
        "data_offsets": [start, start + values.nbytes],
    }


def read_output_projection(objects: ObjectStore, layer: int) -> OutputProjection:
    """Return a layer's W_O. Raises `SiteNotFound` if the run has none, `DamagedObject`."""
    name = weight_key(layer)
    try:
        data = objects.get(name, max_bytes=MAX_WEIGHT_BYTES)
    except ObjectNotFound as error:
        raise SiteNotFound(
            f"the run holds no W_O of layer {layer} ({name}), so contributions cannot be told; "
            "capture with an attnstore that stores it"
        ) from error
    return _decode(data, layer, name)


def _decode(data: bytes, layer: int, name: str) -> OutputProjection:
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(data[8 : 8 + length])
        heads = int(header["__metadata__"]["heads"])
        entry = header["w_o"]
        dtype, (rows, hidden) = _TYPES[entry["dtype"]], map(int, entry["shape"])
        values = memoryview(data)[8 + length :]
        w_o_bytes, bias_bytes = rows * hidden * dtype.itemsize, 0
        if "bias" in header:
            bias_bytes = hidden * dtype.itemsize
            ends = [w_o_bytes, w_o_bytes + bias_bytes]
            due = {"dtype": entry["dtype"], "shape": [hidden], "data_offsets": ends}
            if header["bias"] != due:
                raise ValueError(f"a bias of {header['bias']} where {due} was due")
        if unknown := set(header) - {"__metadata__", "w_o", "bias"}:
            raise ValueError(f"unknown tensors {sorted(unknown)}")
        if len(values) != w_o_bytes + bias_bytes or heads < 1 or rows % heads:
            raise ValueError(f"{len(values)} bytes for {rows} x {hidden} {entry['dtype']}")
        stated, actual = header["__metadata__"]["crc32c"], hex_crc32c(crc32c(values))
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise DamagedObject(f"{name} is not readable ({error}); run `attnstore verify`") from error
    if stated != actual:
        raise DamagedObject(
            f"{name}: its crc32c says {stated}, its bytes give {actual}; run `attnstore verify`"
        )
    w_o_HDM = np.frombuffer(values[:w_o_bytes], dtype).reshape(heads, rows // heads, hidden)
    bias_M = np.frombuffer(values[w_o_bytes:], dtype) if bias_bytes else None
    return OutputProjection(layer, w_o_HDM, bias_M)


def contributions(z_HPD: NDArray[Any], w_o_HDM: NDArray[Any]) -> NDArray[np.float32]:
    """Return each head's addition to the residual stream, float32 [H, P, M], without W_O's bias."""
    if z_HPD.shape[0] != w_o_HDM.shape[0] or z_HPD.shape[2] != w_o_HDM.shape[1]:
        raise ValueError(f"z {z_HPD.shape} does not fit W_O {w_o_HDM.shape}")
    if math.prod(z_HPD.shape) == 0:
        return np.zeros((*z_HPD.shape[:2], w_o_HDM.shape[2]), np.float32)
    return np.asarray(z_HPD, np.float32) @ np.asarray(w_o_HDM, np.float32)
