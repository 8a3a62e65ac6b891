"""What turns a chunk's values into stored bytes: `raw`, `fast` or `small`; then a crc32c."""

from __future__ import annotations

from enum import StrEnum


class Codec(StrEnum):
    """A point between speed and size; `raw` where the link is faster than the cores."""

    RAW = "raw"
    FAST = "fast"
    SMALL = "small"
