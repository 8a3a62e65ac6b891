"""Kernels of vLLM's CPU build that lack a Meta version, which nnsight needs for its own model.

nnsight builds the model on the meta device first. vLLM's CPU experts repack their weights while
they load, by an operator that knows real memory only; on meta tensors there is nothing to do.
"""

from __future__ import annotations

from typing import Any

import torch

_NAMESPACE = "_C"
_WITHOUT_META = ("prepack_moe_weight",)
_libraries: list[Any] = []


def register_meta_kernels() -> None:
    """Give each such operator of this vLLM build a Meta kernel that does nothing; once."""
    if _libraries:
        return
    import vllm._custom_ops  # noqa: F401  (loads the operators)

    library = torch.library.Library(_NAMESPACE, "IMPL")
    _libraries.append(library)
    for name in _WITHOUT_META:
        full = f"{_NAMESPACE}::{name}"
        present = torch._C._dispatch_has_kernel(full)
        if present and not torch._C._dispatch_has_kernel_for_dispatch_key(full, "Meta"):
            library.impl(name, _nothing, "Meta")


def _nothing(*_args: Any) -> None:
    return None
