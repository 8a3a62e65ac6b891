"""Byte counts for people, in one way everywhere: decimal units, as disks, links and prices are.

Sizes that are powers of two by design (a shard of 64 MiB) are words of the documentation, not
counts, and keep their binary units there.
"""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """Return a byte count with three digits and a decimal unit, such as `1.43 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        digits = f"{count:.0f}" if unit == "B" or abs(count) >= 99.95 else f"{count:.3g}"
        if abs(float(digits)) < 1000:
            return f"{digits} {unit}"
        count /= 1000
    return f"{count:.4g} PB"
