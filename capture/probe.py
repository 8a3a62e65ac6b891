"""A user's own function, run on each rank in the forward pass; what it returns becomes sites.

`probe(layer, q, k, v, z, spans)` gets one layer's tensors as [rows, local heads, head size] (q and
z: query heads, k and v: key-value heads) and the step's spans, and returns a dict of tensors with
one row per token: [rows, local query heads] or [rows, local query heads, size]. Names, sizes and
dtypes are found by a trial on rows of zeros and must not change. It works on copies: whatever it
does to them, the model goes on with its own tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from capture.attention_layers import LocalLayer
from capture.errors import ProbeError
from capture.probe_source import load_probe, probe_source
from capture.rows import Span
from store.site_names import is_free

TRIAL_ROWS = (3, 5)
"""Rows of the trial: the first that is not the number of heads, so that [heads, rows] shows."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class ProbeSite:
    """One tensor that a probe returns, as a site of the run."""

    name: str
    head_size: int
    dtype: torch.dtype


class Probe:
    """A probe with what it returns. `path` is `package.module:function`."""

    def __init__(
        self,
        path: str,
        layer: LocalLayer,
        dtype: torch.dtype,
        device: torch.device,
        source: str | None = None,
    ) -> None:
        """Try the probe. `source` is what `probe_source` gave where the run is driven."""
        self.path, self._function = path, load_probe(path)
        _check_source(path, source)
        self.sites: tuple[ProbeSite, ...] = ()
        sizes = (
            (layer.num_heads, layer.head_size),
            (layer.num_kv_heads, layer.head_size),
            (layer.num_kv_heads, layer.v_head_size),
            (layer.num_heads, layer.v_head_size),
        )
        count = next(number for number in TRIAL_ROWS if number != layer.num_heads)
        rows = [torch.zeros(count, *size, dtype=dtype, device=device) for size in sizes]
        answer = self._answer(layer.layer, rows, [Span(None, 0, 0, count)])
        self.sites = tuple(
            _site(path, name, value, (count, layer.num_heads), device)
            for name, value in answer.items()
        )

    def __call__(
        self, layer: int, tensors_THD: Sequence[torch.Tensor], spans: Sequence[Span]
    ) -> list[torch.Tensor]:
        """Return the probe's tensors [rows, local heads, size] in the order of `sites`."""
        answer = self._answer(layer, [tensor.clone() for tensor in tensors_THD], spans)
        found: list[torch.Tensor] = []
        for site in self.sites:
            value = answer.pop(site.name, None)
            rows, heads = tensors_THD[0].shape[:2]
            shape = (rows, heads, site.head_size)
            right = {shape, shape[:2]} if site.head_size == 1 else {shape}
            if value is not None:
                _check_place(self.path, site.name, value, tensors_THD[0].device)
            if value is None or value.dtype != site.dtype or tuple(value.shape) not in right:
                got = None if value is None else (tuple(value.shape), value.dtype)
                raise ProbeError(
                    f"probe {self.path} gave {got} for {site.name} at layer {layer}, {shape} of "
                    f"{site.dtype} was due as in its trial"
                )
            found.append(_plain(value).reshape(shape).contiguous())
        if answer:
            raise ProbeError(f"probe {self.path} gave {sorted(answer)}, which its trial did not")
        return found

    def _answer(
        self, layer: int, tensors_THD: Sequence[torch.Tensor], spans: Sequence[Span]
    ) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            answer = self._function(layer, *tensors_THD, tuple(spans))
        if not isinstance(answer, dict) or not answer:
            raise ProbeError(f"probe {self.path} must return a dict of tensors, got {answer!r}")
        return dict(answer)


def check_name(path: str, name: object) -> None:
    """Raise `ProbeError` for a name that no site of a probe may have."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ProbeError(
            f"probe {path}: {name!r} cannot be a site's name; give 1 to 40 small letters, digits "
            "and _, beginning with a letter"
        )
    if not is_free(name):
        raise ProbeError(
            f"probe {path}: {name!r} cannot be a site's name, since it means something else to a "
            f"reader or in an export; call it {name.removeprefix('hook_')}_of_probe, for example"
        )


def check_names(path: str, sizes: tuple[int, int, int, int]) -> None:
    """Try a probe on a CPU before an engine starts, for its names alone. Raises `ProbeError`.

    `sizes`: query heads, KV heads, and the head sizes of q and k and of v. A probe that fails here
    may need a GPU: the trial on the ranks judges it.
    """
    heads, kv_heads, size, v_size = sizes
    shapes = ((heads, size), (kv_heads, size), (kv_heads, v_size), (heads, v_size))
    count = next(number for number in TRIAL_ROWS if number != heads)
    function = load_probe(path)
    try:
        with torch.no_grad():
            rows = [torch.zeros(count, *shape) for shape in shapes]
            answer = function(0, *rows, (Span(None, 0, 0, count),))
    except Exception:  # noqa: BLE001 - what it needs may be there on the ranks only
        return
    for name in answer if isinstance(answer, dict) else ():
        check_name(path, name)


def _check_source(path: str, due: str | None) -> None:
    """Raise `ProbeError` where this rank would run another source than the run was made with."""
    if due is not None and (found := probe_source(path)) != due:
        raise ProbeError(
            f"probe {path}: its source on this worker is {found}, and where the run is driven "
            f"{due}; bring the same file to every node"
        )


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values without a gradient, and negated in memory where it only says so."""
    return value.detach().resolve_neg()


def _check_place(path: str, name: str, value: torch.Tensor, device: torch.device) -> None:
    """Raise `ProbeError` for a tensor without rows in this device's memory."""
    if value.layout != torch.strided:
        raise ProbeError(f"probe {path}: {name} is a {value.layout} tensor; give a dense one")
    if value.device.type != device.type:
        raise ProbeError(
            f"probe {path}: {name} lies on {value.device}, its rows are on {device}; give tensors "
            "of the device that the probe got"
        )


def _site(
    path: str, name: str, value: Any, due: tuple[int, int], device: torch.device
) -> ProbeSite:
    check_name(path, name)
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
    if shape is None or shape[:2] != due or len(shape) > 3 or 0 in shape:
        raise ProbeError(
            f"probe {path}: {name} is {shape or type(value).__name__}, not [rows, local heads] or "
            f"[rows, local heads, size] for {due[0]} rows of {due[1]} heads"
        )
    if value.dtype not in _DTYPES:
        raise ProbeError(
            f"probe {path}: {name} is {value.dtype}; give float32, float16 or bfloat16"
        )
    _check_place(path, name, value, device)
    return ProbeSite(name, shape[2] if len(shape) == 3 else 1, value.dtype)
