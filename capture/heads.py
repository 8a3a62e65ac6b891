"""Which global heads a tensor-parallel rank computes, and which of them it holds and writes. Pure.

vLLM splits query heads evenly: rank r has heads [r*n, (r+1)*n). KV heads are split the same way
where there are at least as many as ranks; with fewer, each rank holds one, replicated over
`ranks / kv_heads` neighbours, and the first rank of each such group writes it.

A selection of query heads is rounded up to whole *groups*: heads that share a KV head, as many as
make one chunk. Every rank holds equally many, so ranks with fewer are filled up, first with groups
whose KV head is held anyway. KV heads follow: those that the held query heads read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from capture.errors import CaptureError, UnsupportedModel
from store.geometry import CHUNK_TOKENS, MAX_CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A rank's share of one kind of head. `shard` is its place along the array's head axis."""

    total: int
    local: int
    first: int
    shard: int
    writes: bool
    held: tuple[int, ...]
    """The global heads that the rank stores, ascending; all that it computes, or some."""

    @property
    def num_held(self) -> int:
        """Heads that all ranks together store."""
        return len(self.held) * (self.total // self.local)


@dataclass(frozen=True, slots=True)
class HeldHeads:
    """The global heads that one rank stores of a selection, ascending."""

    query: tuple[int, ...]
    kv: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """`count` heads that lie together in what the rank computes, from `local`, and staged.

    Staged from `staged`: either whole chunk groups, or heads of one.
    """

    local: int
    staged: int
    count: int


def head_share(
    total: int, local: int, rank: int, ranks: int, held: Sequence[int] | None = None
) -> HeadShare:
    """Return the share of `rank`, whose module has `local` of `total` heads; `held` None: all.

    Raises `UnsupportedModel` where the numbers follow neither of vLLM's two rules.
    """
    if local * ranks == total:
        first, shard, writes = rank * local, rank, True
    elif local == 1 and total < ranks and ranks % total == 0:
        replicas = ranks // total
        first = shard = rank // replicas
        writes = rank % replicas == 0
    else:
        raise UnsupportedModel(
            f"{local} heads on each of {ranks} ranks do not make up {total} heads; choose a "
            "tensor_parallel_size that divides the heads evenly"
        )
    heads = range(first, first + local) if held is None else held
    return HeadShare(total, local, first, shard, writes, tuple(heads))


def head_group(num_heads: int, num_kv_heads: int, ranks: int, head_bytes: int) -> int:
    """Return how many query heads make a group; `head_bytes` are those of one row of a head."""
    together = gcd(num_heads // num_kv_heads, num_heads // ranks)
    most = max(1, MAX_CHUNK_BYTES // (CHUNK_TOKENS * head_bytes))
    return max(size for size in range(1, together + 1) if together % size == 0 and size <= most)


def select_heads(
    wanted: Sequence[int], num_heads: int, num_kv_heads: int, ranks: int, head_bytes: int
) -> list[HeldHeads]:
    """Return what each rank holds so that all `wanted` query heads are stored.

    Raises `CaptureError` for a head that the model has not.
    """
    unknown = [head for head in wanted if not 0 <= head < num_heads]
    if unknown or not wanted:
        raise CaptureError(
            f"capture.heads names heads {unknown}; the model has query heads 0 to {num_heads - 1}"
        )
    size = head_group(num_heads, num_kv_heads, ranks, head_bytes)
    sharing, local = num_heads // num_kv_heads, num_heads // ranks
    per_rank = [{head // size for head in wanted if head // local == rank} for rank in range(ranks)]
    most = max(map(len, per_rank))
    held: list[HeldHeads] = []
    for rank, groups in enumerate(per_rank):
        read = {group * size // sharing for group in groups}
        others = sorted(
            set(range(rank * local // size, (rank + 1) * local // size)) - groups,
            key=lambda group: (group * size // sharing not in read, group),
        )
        chosen = sorted({*groups, *others[: most - len(groups)]})
        query = tuple(head for group in chosen for head in range(group * size, (group + 1) * size))
        held.append(HeldHeads(query, tuple(sorted({head // sharing for head in query}))))
    most_kv = max(len(heads.kv) for heads in held)
    kv_local = max(1, num_kv_heads // ranks)
    filled: list[HeldHeads] = []
    for heads in held:
        first = heads.kv[0] // kv_local * kv_local
        others = [head for head in range(first, first + kv_local) if head not in heads.kv]
        kv = tuple(sorted((*heads.kv, *others[: most_kv - len(heads.kv)])))
        filled.append(HeldHeads(heads.query, kv))
    return filled


def head_slices(share: HeadShare, group_heads: int) -> tuple[HeadSlice, ...]:
    """Return the fewest slices that take a share's held heads to staged groups of `group_heads`."""
    slices: list[HeadSlice] = []
    for staged, head in enumerate(share.held):
        place, last = head - share.first, slices[-1] if slices else None
        goes_on = staged % group_heads and last is not None and last.local + last.count == place
        if last is not None and goes_on:
            slices[-1] = HeadSlice(last.local, last.staged, last.count + 1)
        else:
            slices.append(HeadSlice(place, staged, 1))
    joined: list[HeadSlice] = []
    for piece in slices:
        last = joined[-1] if joined else None
        whole = last is not None and last.count % group_heads == 0 == piece.count % group_heads
        if last is not None and whole and last.local + last.count == piece.local:
            joined[-1] = HeadSlice(last.local, last.staged, last.count + piece.count)
        else:
            joined.append(piece)
    return tuple(joined)
