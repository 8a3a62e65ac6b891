"""Two probes to start from (docs/probes.md): `capture: {probe: examples.probes:output_norms}`.

Legend: T rows of the step, N query heads of the rank, K keys, D head size.
"""

from __future__ import annotations

from typing import Any

import torch


def output_norms(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, spans: Any
) -> dict[str, torch.Tensor]:
    """Return each head's output norm."""
    return {"z_norm": z.float().norm(dim=-1)}


def last_row_entropy(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, spans: Any
) -> dict[str, torch.Tensor]:
    """Return the entropy (in nats) of each prompt's last pattern row, NaN at all other rows.

    The row needs every key of its prompt, so it is that of the last position only where the engine
    computes the prompt in one step; of a longer one it is the first step's last row. For layers of
    the usual scale without window, soft-cap, ALiBi and sinks.
    """
    entropy_TN = torch.full(z.shape[:2], torch.nan, dtype=torch.float32, device=z.device)
    group = q.shape[1] // k.shape[1]
    first = 0
    for span in spans:
        end = first + span.num_rows
        if span.position == 0:
            keys_KND = k[first:end].float().repeat_interleave(group, dim=1)
            scores_NK = torch.einsum("nd,knd->nk", q[end - 1].float(), keys_KND)
            probs_NK = (scores_NK * q.shape[-1] ** -0.5).softmax(-1)
            entropy_TN[end - 1] = torch.special.entr(probs_NK).sum(-1)
        first = end
    return {"last_row_entropy": entropy_TN}
