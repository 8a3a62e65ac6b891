"""Rows of many prompts as a stream of batches, in plan order or shuffled, within bounded memory.

Knows blocks of prompts; never knows torch or training. The order is a pure function of (prompts,
seed, buffer, worker): blocks are shuffled, dealt out to workers, gathered into *groups* that fit
the buffer, and within a group every row (or whole prompt) is shuffled. So mixing is exact inside a
group and a group draws its blocks from the whole run. A place in the stream is one number, the
items consumed; to resume, only the group that holds it is read again.

Legend: R rows, L layers, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from typing import Any, Literal

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from store.prompt_blocks import Block, BlockReader, Chosen
from store.selection import AxisSelection, integers

Indices = NDArray[np.int64]
Unit = Literal["token", "prompt"]

BUFFER_BYTES = 256 << 20
BLOCK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of several prompts. `arrays[site]` is [R, L, H, D]; row i is position `pos[i]` of prompt
    row `prompt[i]`. `position` is the place in the stream after this batch: resume from it."""

    arrays: Mapping[str, NDArray[Any]]
    prompt: Indices
    pos: Indices
    layers: tuple[int, ...]
    heads: Mapping[str, tuple[int, ...]]
    position: int

    def __len__(self) -> int:
        return len(self.pos)

    def as_xarray(self, site: str) -> xr.DataArray:
        """Return one site's rows with labelled dims `row layer head|kv_head d_head`."""
        kv = site in ("rot_k", "v", "pre_k")
        head = "kv_head" if kv else "head"
        return xr.DataArray(
            self.arrays[site],
            dims=("row", "layer", head, "d_head"),
            coords={
                "prompt": ("row", self.prompt),
                "pos": ("row", self.pos),
                "layer": list(self.layers),
                head: list(self.heads[site]),
            },
            name=site,
        )


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Everything that decides the order of a stream. `worker` is (which, of how many)."""

    size: int = 256
    by: Unit = "token"
    shuffle: int | None = None
    buffer_bytes: int = BUFFER_BYTES
    worker: tuple[int, int] = (0, 1)
    drop_last: bool = False

    def __post_init__(self) -> None:
        which, count = self.worker
        named = {"size": self.size, "buffer_bytes": self.buffer_bytes, "worker": which}
        more = {"workers": count, "shuffle": 0 if self.shuffle is None else self.shuffle}
        for name, value in (named | more).items():
            integers(name, [value])
        if self.size < 1 or self.buffer_bytes < 1:
            raise ValueError(f"size and buffer_bytes are at least 1, got {self}")
        if not 0 <= which < count:
            raise ValueError(f"worker {which} of {count} does not exist; workers count from 0")
        if self.by not in ("token", "prompt"):
            raise ValueError(f"by={self.by!r}: give 'token' or 'prompt'")


@dataclass(frozen=True, slots=True)
class _Group:
    """Blocks that are in memory together, and the place of their first item in the stream."""

    number: int
    blocks: tuple[Block, ...]
    first_item: int
    num_items: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A group's rows in stream order; `item_rows` are the row bounds of its items."""

    arrays: dict[str, NDArray[Any]] = field(repr=False)
    prompt: Indices
    pos: Indices
    item_bounds: Indices


class Batches:
    """An iterable of `Batch`; each iteration starts at `position`; `len` counts its batches."""

    def __init__(
        self,
        chosen: Chosen,
        readers: Sequence[BlockReader],
        order: BatchOrder,
        *,
        position: int = 0,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        if not readers:
            raise ValueError("name at least one site")
        self._readers = readers
        self._order = order
        self._dtype = dtype
        self.missing = chosen.missing
        self._groups = _groups(chosen.blocks, readers, order)
        self.num_items = sum(group.num_items for group in self._groups)
        integers("position", [position])
        if not 0 <= position <= self.num_items:
            raise ValueError(f"position {position} is outside the stream of {self.num_items} items")
        self.position = position

    def __len__(self) -> int:
        left = self.num_items - self.position
        return left // self._order.size if self._order.drop_last else -(-left // self._order.size)

    def __iter__(self) -> Iterator[Batch]:
        position = self.position
        groups = [g for g in self._groups if g.first_item + g.num_items > position]
        if not groups:
            return
        axes = self._axes(groups[0].blocks[0])
        held: list[tuple[_Loaded, slice]] = []
        needed = self._order.size
        with ThreadPoolExecutor(1, thread_name_prefix="attnstore-batches") as ahead:
            future: Future[_Loaded] = ahead.submit(self._load, groups[0])
            for place, group in enumerate(groups):
                loaded = future.result()
                if place + 1 < len(groups):
                    future = ahead.submit(self._load, groups[place + 1])
                at = max(0, position - group.first_item)
                while at < group.num_items:
                    stop = min(at + needed, group.num_items)
                    held.append((loaded, slice(at, stop)))
                    needed -= stop - at
                    position += stop - at
                    at = stop
                    if needed == 0:
                        yield self._batch(held, axes, position)
                        held, needed = [], self._order.size
        if held and not self._order.drop_last:
            yield self._batch(held, axes, position)

    def _axes(self, block: Block) -> dict[str, tuple[AxisSelection, AxisSelection]]:
        return {reader.site: reader.axes(block) for reader in self._readers}

    def _batch(
        self,
        held: Sequence[tuple[_Loaded, slice]],
        axes: Mapping[str, tuple[AxisSelection, AxisSelection]],
        position: int,
    ) -> Batch:
        spans = [
            (loaded, slice(loaded.item_bounds[part.start], loaded.item_bounds[part.stop]))
            for loaded, part in held
        ]

        def joined(pick: Any) -> NDArray[Any]:
            parts = [pick(loaded)[rows] for loaded, rows in spans]
            return np.concatenate(parts) if len(parts) > 1 else parts[0].copy()

        sites = {r.site: joined(lambda part, site=r.site: part.arrays[site]) for r in self._readers}
        first = next(iter(axes.values()))[0]
        return Batch(
            arrays=sites,
            prompt=joined(lambda part: part.prompt),
            pos=joined(lambda part: part.pos),
            layers=tuple(first.labels.tolist()),
            heads={site: tuple(heads.labels.tolist()) for site, (_, heads) in axes.items()},
            position=position,
        )

    def _load(self, group: _Group) -> _Loaded:
        """Read a group's blocks and put their rows in stream order."""
        prompts = [(block, part) for block in group.blocks for part in block.prompts()]
        prompt = np.concatenate([np.full(len(p.places), p.row, np.int64) for _, p in prompts])
        pos = np.concatenate([p.positions for _, p in prompts])
        order, bounds = self._item_order(group, [len(p.places) for _, p in prompts])
        target = np.empty(len(order), np.int64)
        target[order] = np.arange(len(order))
        arrays: dict[str, NDArray[Any]] = {}
        for reader in self._readers:
            first = group.blocks[0]
            rows_RLHD = np.empty(
                (len(order), *reader.shape(first)), self._dtype or reader.dtype(first)
            )
            arrays[reader.site] = rows_RLHD
            start = 0
            for block in group.blocks:
                places = target[start : start + block.num_rows]
                reader.read_into(block, rows_RLHD.transpose(1, 2, 0, 3), places)
                start += block.num_rows
        return _Loaded(arrays, prompt[order], pos[order], bounds)

    def _item_order(self, group: _Group, lengths: Sequence[int]) -> tuple[Indices, Indices]:
        """Return (rows in stream order, row bounds of each item)."""
        total = sum(lengths)
        seed = self._order.shuffle
        which = self._order.worker[0]
        rng = None if seed is None else np.random.default_rng([seed, 1, which, group.number])
        if self._order.by == "token":
            order = np.arange(total) if rng is None else rng.permutation(total)
            return order, np.arange(total + 1)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        prompts = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
        parts = [np.arange(starts[p], starts[p + 1]) for p in prompts]
        bounds = np.concatenate([[0], np.cumsum(np.asarray(lengths)[prompts])]).astype(np.int64)
        return np.concatenate(parts), bounds


def _groups(
    blocks: Sequence[Block], readers: Sequence[BlockReader], order: BatchOrder
) -> list[_Group]:
    """Shuffle, deal out to workers, and gather blocks into groups that fit the buffer."""
    if not blocks:
        return []
    dealt = np.arange(len(blocks))
    if order.shuffle is not None:
        dealt = np.random.default_rng([order.shuffle, 0]).permutation(len(blocks))
    which, count = order.worker
    mine = [blocks[i] for i in dealt[which::count]]
    row_bytes = sum(reader.row_bytes(blocks[0]) for reader in readers)
    # Two groups are in memory at a time: the one being handed out and the one being read.
    max_rows = max(1, order.buffer_bytes // 2 // max(1, row_bytes))
    groups: list[_Group] = []
    held: list[Block] = []
    rows = first = 0

    def close() -> None:
        nonlocal held, rows, first
        # A unit's blocks are read at once; the shuffle inside the group makes their order moot.
        held.sort(key=lambda block: block.first_row)
        held = [reduce(Block.joined, same) for _, same in groupby(held, lambda block: block.unit)]
        items = rows if order.by == "token" else sum(len(block.places) for block in held)
        groups.append(_Group(len(groups), tuple(held), first, items))
        first += items
        held, rows = [], 0

    for block in mine:
        if held and rows + block.num_rows > max_rows:
            close()
        held.append(block)
        rows += block.num_rows
    if held:
        close()
    return groups
