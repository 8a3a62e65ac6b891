"""Probes as a user would write them, for the tests."""

from __future__ import annotations

import errno
from typing import Any

import torch

from examples.probes import last_row_entropy, output_norms

NAME = "mine"
"""What `named` calls its site."""


def named(layer: int, q: Any, k: Any, v: Any, z: Any, spans: Any) -> dict[str, Any]:
    """Return a site of a name that a test chooses."""
    return {NAME: z.float().norm(dim=-1)}


def no_cpu(layer: int, q: Any, k: Any, v: Any, z: Any, spans: Any) -> dict[str, Any]:
    """Refuse what does not lie on a GPU."""
    raise NotImplementedError("not on a CPU")


def norms(layer: int, q: Any, k: Any, v: Any, z: Any, spans: Any) -> dict[str, Any]:
    """What the examples give, and z with its layer's number added, in another type."""
    assert sum(span.num_rows for span in spans) == z.shape[0]
    return {
        **output_norms(layer, q, k, v, z, spans),
        **last_row_entropy(layer, q, k, v, z, spans),
        "z_plus_layer": (z + layer).half(),
    }


def fails(layer: int, q: Any, k: Any, v: Any, z: Any, spans: Any) -> dict[str, Any]:
    """Raise on the first step longer than the trial, at layer 1, in words of a failing store."""
    if layer == 1 and z.shape[0] > 3:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "StoreError: this probe dislikes layer 1")
    return {"zero": z[..., 0] * 0}


def wrong_rows(layer: int, q: Any, k: Any, v: Any, z: Any, spans: Any) -> dict[str, Any]:
    """Return one number for the whole step."""
    return {"mean": z.mean()}


def scribbles(layer: int, q: Any, k: Any, v: Any, z: Any, spans: Any) -> dict[str, Any]:
    """Write into everything that it is given."""
    norm = z.float().norm(dim=-1)
    for tensor in (q, k, v, z):
        tensor.zero_()
    return {"z_norm": norm}


def heads_first(layer: int, q: Any, k: Any, v: Any, z: Any, spans: Any) -> dict[str, Any]:
    """Return [local heads, rows]."""
    return {"z_norm": z.float().norm(dim=-1).transpose(0, 1)}


def views(layer: int, q: Any, k: Any, v: Any, z: Any, spans: Any) -> dict[str, Any]:
    """Return tensors whose memory is not laid out as their values are."""
    weight = torch.full((), 2.0, requires_grad=True)
    with torch.enable_grad():
        learnt = z * weight
    return {
        "expanded": z[:, :1, :1].expand(z.shape[0], z.shape[1], 4),
        "turned": z.transpose(0, 1).contiguous().transpose(0, 1),
        "negated": torch.complex(z, z).conj().imag,
        "learnt": learnt,
    }


def sparse(layer: int, q: Any, k: Any, v: Any, z: Any, spans: Any) -> dict[str, Any]:
    """Return a tensor that has no rows in memory."""
    return {"sparse": z.to_sparse()}


def elsewhere(layer: int, q: Any, k: Any, v: Any, z: Any, spans: Any) -> dict[str, Any]:
    """Return a tensor of another device."""
    return {"elsewhere": z.to("meta")}
