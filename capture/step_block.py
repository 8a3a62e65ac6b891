"""The block that nnsight runs once per engine step, over the whole packed slab.

It reads each wanted attention layer in forward order: q, k and v as the kernel gets them, then z,
the per-head output before W_O. What it reads is memory that later kernels overwrite, so the sink
copies at once. It knows nothing of requests: rows are the sink's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from capture.errors import AdapterMismatch


class StepSink(Protocol):
    """Takes one tensor of the step, [rows, heads * head size], and copies what it needs."""

    def put(self, tap: int, x_TF: torch.Tensor) -> None: ...

    def probe(self, reads: LayerReads, q: Any, k: Any, v: Any, z: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class LayerReads:
    """What to read of one layer: the envoy of its attention module, and the taps to feed.

    A tap is a number the sink knows; None where the rank does not store that site.
    """

    layer: int
    envoy: Any
    rot_q: int | None
    rot_k: int | None
    v: int | None
    z: int | None
    probe: tuple[int, ...] = ()
    """Taps of what the user's probe returns, if there is one."""

    @property
    def reads_inputs(self) -> bool:
        return bool(self.probe) or (self.rot_q, self.rot_k, self.v) != (None, None, None)


def capture_step(layers: Sequence[LayerReads], sink: StepSink) -> None:
    """Read every layer of one forward pass; the body of the step's nnsight block."""
    for reads in layers:
        if reads.reads_inputs:
            query, key, value = query_key_value(*reads.envoy.inputs)
            for tap, tensor in ((reads.rot_q, query), (reads.rot_k, key), (reads.v, value)):
                if tap is not None:
                    sink.put(tap, tensor)
        if reads.z is None and not reads.probe:
            continue
        z = reads.envoy.output
        if reads.z is not None:
            sink.put(reads.z, z)
        if reads.probe:
            sink.probe(reads, query, key, value, z)


def query_key_value(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return q, k, v from the arguments of vLLM's `Attention.forward`, however they were passed."""
    names = ("query", "key", "value")
    found = [*args[:3], *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
    if len(found) != len(names) or not all(isinstance(x, torch.Tensor) for x in found):
        shown = [type(x).__name__ for x in found]
        raise AdapterMismatch(
            f"an attention layer was called with {shown} instead of three tensors q, k, v; "
            "its rows cannot be captured"
        )
    return found[0], found[1], found[2]
