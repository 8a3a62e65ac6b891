"""crc32c (Castagnoli), the one checksum of the format: of chunks, of objects, of JSON bodies.

The `crc32c` package uses the processor's instruction (27 GB/s a core measured), takes any buffer
and lets other threads run meanwhile; google-crc32c is as fast but takes only `bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable

import crc32c as _crc32c
from typing_extensions import Buffer


def crc32c(data: Buffer, seed: int = 0) -> int:
    """Return the crc32c of `data`, continued from `seed` (the crc32c of what came before)."""
    return _crc32c.crc32c(data, seed)


def crc32c_of_parts(parts: Iterable[Buffer]) -> int:
    """Return the crc32c of the concatenation of `parts`."""
    value = 0
    for part in parts:
        value = crc32c(part, value)
    return value


def hex_crc32c(value: int) -> str:
    """Return a checksum the way the format's JSON writes it: eight lower-case hex digits."""
    return f"{value:08x}"
