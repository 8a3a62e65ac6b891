"""Which global heads a tensor-parallel rank computes, and which of them it writes. Pure.

vLLM splits query heads evenly: rank r has heads [r*n, (r+1)*n). KV heads are split the same way
where there are at least as many as ranks; with fewer, each rank holds one, replicated over
`ranks / kv_heads` neighbours, and the first rank of each such group writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from capture.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A rank's share of one kind of head. `shard` is its place along the array's head axis."""

    total: int
    local: int
    first: int
    shard: int
    writes: bool

    @property
    def heads(self) -> range:
        """The global heads that the rank computes, in local order."""
        return range(self.first, self.first + self.local)


def head_share(total: int, local: int, rank: int, ranks: int) -> HeadShare:
    """Return the share of `rank`, whose module has `local` of `total` heads.

    Raises `UnsupportedModel` where the numbers follow neither of vLLM's two rules.
    """
    if local * ranks == total:
        return HeadShare(total, local, rank * local, rank, True)
    if local == 1 and total < ranks and ranks % total == 0:
        replicas = ranks // total
        return HeadShare(total, 1, rank // replicas, rank // replicas, rank % replicas == 0)
    raise UnsupportedModel(
        f"{local} heads on each of {ranks} ranks do not make up {total} heads; choose a "
        "tensor_parallel_size that divides the heads evenly"
    )
