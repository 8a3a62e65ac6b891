"""How an array of one unit is cut into shards and chunks. Pure arithmetic; knows no store.

Legend: L layers held, T tokens (rows) of the unit, H heads held, D head size.

An array is [L, T, H, D]. A *shard* (one object, written by one rank alone) covers one layer,
`shard_tokens` tokens, `shard_heads` heads and all of D. Inside it, a *chunk* covers `chunk_tokens`
tokens of one head group of `group_heads` heads, its values in [head, token, D] order. Chunks lie
head-group-major in the shard: all of group 0 by token, then group 1, ... so that one head group
over all tokens is one byte range. A rank's shard is never split along heads.

A stored chunk ends in its 4 crc32c bytes; a 4-byte *tag* that names its place follows it
(`store.shard`). Arrays written before there were tags have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

CHUNK_TOKENS = 256
MAX_CHUNK_BYTES = 384 << 10
MAX_SHARD_BYTES = 64 << 20
CHECKSUM_BYTES = 4
TAG_BYTES = 4
INDEX_ENTRY_BYTES = 16


@dataclass(frozen=True, slots=True)
class ArrayGeometry:
    """The cut of one site's array in one unit. Sizes in elements unless a name says bytes."""

    num_layers: int
    num_tokens: int
    num_heads: int
    head_size: int
    item_bytes: int
    shard_tokens: int
    shard_heads: int
    chunk_tokens: int
    group_heads: int
    tags: bool = False
    """Whether a tag follows every chunk."""

    def __post_init__(self) -> None:
        positive = (
            self.num_layers,
            self.num_heads,
            self.head_size,
            self.item_bytes,
            self.shard_tokens,
            self.shard_heads,
            self.chunk_tokens,
            self.group_heads,
        )
        if min(positive) < 1 or self.num_tokens < 0:
            raise ValueError(f"sizes must be positive: {self}")
        if self.num_heads % self.shard_heads or self.shard_heads % self.group_heads:
            raise ValueError(f"heads must divide evenly into shards and groups: {self}")
        if self.shard_tokens % self.chunk_tokens:
            raise ValueError(f"a shard must hold whole token chunks: {self}")
        if max(self.chunk_bytes, self.index_bytes) > MAX_SHARD_BYTES:
            raise ValueError(f"chunks or indexes above {MAX_SHARD_BYTES} bytes: {self}")

    @classmethod
    def plan(
        cls,
        *,
        num_layers: int,
        num_tokens: int,
        num_heads: int,
        shard_heads: int,
        head_size: int,
        item_bytes: int,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> ArrayGeometry:
        """Choose the cut for one unit: chunks of at most 384 KiB, shards of at most 64 MiB.

        The head group is the largest divisor of `shard_heads` whose chunk fits. Only a head size so
        large that a single head does not fit makes the chunk shorter than 256 tokens.
        """
        row_bytes = head_size * item_bytes
        chunk_tokens = CHUNK_TOKENS
        while chunk_tokens > 1 and chunk_tokens * row_bytes > MAX_CHUNK_BYTES:
            chunk_tokens //= 2
        group_heads = max(
            g
            for g in range(1, shard_heads + 1)
            if shard_heads % g == 0 and (g == 1 or g * chunk_tokens * row_bytes <= MAX_CHUNK_BYTES)
        )
        fitting = max_shard_bytes // (row_bytes * shard_heads * CHUNK_TOKENS) * CHUNK_TOKENS
        needed = -(-max(num_tokens, 1) // CHUNK_TOKENS) * CHUNK_TOKENS
        return cls(
            num_layers=num_layers,
            num_tokens=num_tokens,
            num_heads=num_heads,
            head_size=head_size,
            item_bytes=item_bytes,
            shard_tokens=max(CHUNK_TOKENS, min(fitting, needed)),
            shard_heads=shard_heads,
            chunk_tokens=chunk_tokens,
            group_heads=group_heads,
            tags=True,
        )

    @property
    def tag_bytes(self) -> int:
        """Bytes that follow each chunk and belong to no chunk."""
        return TAG_BYTES if self.tags else 0

    @property
    def raw_chunk_stride(self) -> int:
        """Bytes from one raw chunk to the next: its values, its crc32c, its tag."""
        return self.chunk_bytes + CHECKSUM_BYTES + self.tag_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk's values, before any codec."""
        return self.group_heads * self.chunk_tokens * self.head_size * self.item_bytes

    @property
    def groups_per_shard(self) -> int:
        return self.shard_heads // self.group_heads

    @property
    def token_chunks_per_shard(self) -> int:
        return self.shard_tokens // self.chunk_tokens

    @property
    def num_token_shards(self) -> int:
        return -(-self.num_tokens // self.shard_tokens)

    @property
    def num_head_shards(self) -> int:
        return self.num_heads // self.shard_heads

    @property
    def index_bytes(self) -> int:
        """Bytes of a shard's index with its checksum, at the end of the shard."""
        chunks = self.groups_per_shard * self.token_chunks_per_shard
        return chunks * INDEX_ENTRY_BYTES + CHECKSUM_BYTES

    def tokens_in_shard(self, token_shard: int) -> int:
        """Return how many tokens of the array lie in token shard `token_shard`."""
        return min(self.shard_tokens, self.num_tokens - token_shard * self.shard_tokens)

    def token_chunks_in_shard(self, token_shard: int) -> int:
        """Return how many token chunks of a shard hold any token; the others are absent."""
        return -(-self.tokens_in_shard(token_shard) // self.chunk_tokens)

    def num_chunks(self, token_shard: int) -> int:
        """Return how many chunks a shard stores."""
        return self.groups_per_shard * self.token_chunks_in_shard(token_shard)

    def chunk_number(self, token_shard: int, group: int, token_chunk: int) -> int:
        """Return a chunk's number in its shard, counted in physical order."""
        return group * self.token_chunks_in_shard(token_shard) + token_chunk

    def raw_chunk_offset(self, token_shard: int, group: int, token_chunk: int) -> int:
        """Return a raw chunk's byte offset in its shard (all are of one size)."""
        return self.chunk_number(token_shard, group, token_chunk) * self.raw_chunk_stride

    def raw_shard_bytes(self, token_shard: int) -> int:
        """Return a raw shard's size in bytes, index included."""
        return self.num_chunks(token_shard) * self.raw_chunk_stride + self.index_bytes

    def shard_places(self) -> Iterator[tuple[int, int, int]]:
        """Yield (layer index, token shard, head shard) of every shard, in order."""
        return product(
            range(self.num_layers), range(self.num_token_shards), range(self.num_head_shards)
        )

    def shard_coordinates(self) -> list[tuple[int, int, int, int]]:
        """Return every shard's coordinates (layer, token shard, head shard, 0), in order."""
        return [(*place, 0) for place in self.shard_places()]
