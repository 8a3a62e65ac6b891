"""What a read will cost, worked out by the planner without reading anything.

Knows plans; never knows stores. A call is one `get_ranges` of one object; a request is one byte
range of it, which is one GET against an object store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from store.read_plan import ObjectRead


@dataclass(frozen=True, slots=True)
class ReadCost:
    """The cost of one read. `wanted_bytes` is what the answer itself holds."""

    calls: int
    requests: int
    chunks: int
    bytes: int
    wanted_bytes: int

    @classmethod
    def of(cls, reads: Sequence[ObjectRead], wanted_bytes: int) -> ReadCost:
        """Return the cost of these planned reads."""
        ranges = [part for read in reads for part in read.ranges]
        return cls(
            calls=len(reads),
            requests=len(ranges),
            chunks=sum(len(part.chunks) for part in ranges),
            bytes=sum(read.bytes for read in reads),
            wanted_bytes=wanted_bytes,
        )

    @classmethod
    def total(cls, costs: Iterable[ReadCost]) -> ReadCost:
        """Return the sum of several costs."""
        parts = list(costs)
        return cls(
            calls=sum(cost.calls for cost in parts),
            requests=sum(cost.requests for cost in parts),
            chunks=sum(cost.chunks for cost in parts),
            bytes=sum(cost.bytes for cost in parts),
            wanted_bytes=sum(cost.wanted_bytes for cost in parts),
        )

    @property
    def amplification(self) -> float:
        """Bytes read for each byte wanted."""
        return self.bytes / self.wanted_bytes if self.wanted_bytes else 0.0

    def __str__(self) -> str:
        return (
            f"{self.calls} calls, {self.requests} requests, {self.chunks} chunks, "
            f"{self.bytes:,} bytes for {self.wanted_bytes:,} wanted "
            f"({self.amplification:.2f} read for each)"
        )
