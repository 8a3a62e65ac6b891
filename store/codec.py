"""What turns a chunk's values into stored bytes: `raw`, `fast` or `small`. Always a crc32c after
it.

`fast` is the speed point (blosc lz4, bitshuffle), `small` the size point (blosc zstd 1, shuffle,
one block per chunk: with blosc's own block size a quarter of the ratio and two thirds of the
decoding speed are lost). Both run without the interpreter's lock, so threads of one process encode
side by side.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import Any

import ml_dtypes
import numcodecs.blosc
import numpy as np
from typing_extensions import Buffer

from store.errors import DamagedObject

# With its own threads blosc serialises all callers on one global context and holds the
# interpreter's lock; each call with a context of its own does neither. zarr-python sets the same.
numcodecs.blosc.use_threads = False

_BLOSC_HEADER = struct.Struct("<BBBBIII")


class Codec(StrEnum):
    """A point between speed and size; `raw` where the link is faster than the cores."""

    RAW = "raw"
    FAST = "fast"
    SMALL = "small"


DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "uint8": np.dtype(np.uint8),
}
"""The element types of the format, by their Zarr names."""


def blosc_configuration(codec: Codec, item_bytes: int, chunk_bytes: int) -> dict[str, Any] | None:
    """Return the Zarr configuration of the codec's blosc stage, or None for `raw`."""
    if codec is Codec.RAW:
        return None
    if codec is Codec.FAST:
        return {
            "cname": "lz4",
            "clevel": 5,
            "shuffle": "bitshuffle",
            "typesize": item_bytes,
            "blocksize": 0,
        }
    return {
        "cname": "zstd",
        "clevel": 1,
        "shuffle": "shuffle",
        "typesize": item_bytes,
        "blocksize": chunk_bytes,
    }


def compress(codec: Codec, values: np.ndarray[Any, Any]) -> bytes:
    """Return the blosc frame of a contiguous chunk; `codec` is `fast` or `small`."""
    item_bytes = values.dtype.itemsize
    settings = blosc_configuration(codec, item_bytes, values.nbytes)
    if settings is None:
        raise ValueError("raw chunks are stored as they are")
    shuffle = numcodecs.blosc.BITSHUFFLE if codec is Codec.FAST else numcodecs.blosc.SHUFFLE
    frame: bytes = numcodecs.blosc.compress(
        values.view(np.uint8).reshape(-1),
        settings["cname"].encode(),
        settings["clevel"],
        shuffle,
        settings["blocksize"],
        item_bytes,
    )
    return frame


def decompress(frame: Buffer, out: np.ndarray[Any, Any], name: str) -> None:
    """Fill `out`, a contiguous uint8 array, from a blosc frame that must hold exactly that much.

    The frame's own sizes are checked before blosc sees it. Raises `DamagedObject`.
    """
    view = memoryview(frame)
    stated = _BLOSC_HEADER.unpack(view[:16]) if view.nbytes >= 16 else None
    if stated is None or stated[4] != out.nbytes or stated[6] != view.nbytes:
        raise DamagedObject(
            f"{name}: a compressed chunk of {view.nbytes} bytes should hold {out.nbytes} bytes "
            "and does "
            "not; run `attnstore verify`"
        )
    try:
        numcodecs.blosc.decompress(view, out)
    except (RuntimeError, ValueError) as error:
        raise DamagedObject(
            f"{name}: a chunk does not decompress ({error}); run `attnstore verify`"
        ) from error
