"""What contradicts itself inside a commit: rows, labels, cuts, shards, sizes. Pure; reads nothing.

A commit is untrusted: it may have been altered and sealed again. What it must agree with outside of
itself is checked by `store.planned_units` (the plan) and `store.model_check` (the model).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from store import keys
from store.codec import Codec
from store.errors import FormatError
from store.geometry import CHECKSUM_BYTES, ArrayGeometry
from store.packed_pattern import num_entries, plan_pattern
from store.run_format import ArrayRecord, Commit, Outcome, Site
from store.shard_index import chunk_offsets

_BLOSC_OVERHEAD = 16


def commit_problems(commit: Commit) -> list[str]:
    """Return what contradicts itself inside a commit: rows, shards, sizes. Reads nothing."""
    return [*_row_problems(commit), *_array_problems(commit)]


def _row_problems(commit: Commit) -> Iterator[str]:
    prompts = commit.prompts
    columns = (prompts.outcome, prompts.first_row, prompts.num_rows, prompts.first_position)
    if len({len(column) for column in columns}) != 1:
        yield f"prompt columns of lengths {[len(column) for column in columns]}"
        return
    row = 0
    for place, outcome in enumerate(prompts.outcome):
        if outcome is Outcome.STORED:
            if prompts.first_row[place] != row or prompts.num_rows[place] < 1:
                yield (
                    f"prompt {place} has {prompts.num_rows[place]} rows from "
                    f"{prompts.first_row[place]}, "
                    f"expected some from {row}"
                )
            row = prompts.first_row[place] + prompts.num_rows[place]
        elif prompts.num_rows[place]:
            yield f"prompt {place} is {outcome} and has {prompts.num_rows[place]} rows"
        elif str(place) not in prompts.reasons:
            yield f"prompt {place} is {outcome} without a reason"
    if row and not commit.arrays:
        yield f"{prompts.outcome.count(Outcome.STORED)} prompts are stored, in no array"
    entries = sum(num_entries(rows) for rows in prompts.num_rows)
    for array in commit.arrays:
        expected = entries if array.is_packed else row
        if array.num_tokens != expected:
            kind = "entries" if array.is_packed else "rows"
            yield f"array {array.site} holds {array.num_tokens} {kind}, its prompts {expected}"


def _array_problems(commit: Commit) -> Iterator[str]:
    sizes = {record.name: record.bytes for record in commit.objects}
    if len(sizes) != len(commit.objects):
        yield "an object is named twice"
    sites = [array.site for array in commit.arrays]
    if len(set(sites)) != len(sites):
        yield f"a site is there twice: {sites}"
    shards: set[str] = set()
    for name in [keys.GROUP_METADATA, *map(keys.array_metadata_key, sites)] if sites else []:
        if name not in sizes:
            yield f"{name} is not among the commit's objects"
    for array in commit.arrays:
        yield from _label_problems(commit, array)
        try:
            geometry = array.geometry()
        except FormatError as error:
            yield str(error)
            continue
        if (array.chunk_tokens, array.group_heads) != _due_chunks(array, geometry):
            yield (
                f"array {array.site} has chunks of {array.chunk_tokens} tokens of "
                f"{array.group_heads} heads, which is not how its shards are cut"
            )
        if geometry.num_layers * geometry.num_token_shards * geometry.num_head_shards > len(sizes):
            yield f"array {array.site} has more shards than the commit has objects"
            continue
        for layer, token_shard, head_shard in geometry.shard_places():
            name = array.shard_name(layer, token_shard, head_shard)
            shards.add(name)
            problem = _shard_problem(array, geometry, name, token_shard, sizes.get(name))
            if problem:
                yield problem
        if array.codec is Codec.RAW and array.chunk_sizes:
            yield f"array {array.site} is raw and lists chunk sizes"
    for name in sizes:
        if "/c/" in name and name not in shards:
            yield f"{name} belongs to no array"


def _label_problems(commit: Commit, array: ArrayRecord) -> Iterator[str]:
    """Yield what is wrong with the names of an array's axes, layers and heads."""
    head_dim = Site(array.site).head_dim_name if array.site in set(Site) else "head"
    dims = ["layer", "token", head_dim, "d_head"]
    if array.site == Site.PATTERN:
        dims = ["layer", "head", "entry"]
    if array.dims != dims:
        yield f"array {array.site} has the dims {array.dims}, not {dims}"
    for what, numbers in (("layers", array.layers), ("heads", array.heads)):
        if any(one >= after for one, after in pairwise(numbers)):
            yield f"array {array.site} lists {what} out of order or twice"
    written = [rank.heads[array.site] for rank in commit.ranks if array.site in rank.heads]
    if written and [head for heads in written for head in heads] != array.heads:
        yield f"array {array.site} does not hold the heads that its ranks wrote, in their order"


def _due_chunks(array: ArrayRecord, cut: ArrayGeometry) -> tuple[int, int]:
    """Return the tokens and heads of a chunk that the format gives an array cut like this."""
    if array.is_packed:
        due = plan_pattern(
            num_layers=cut.num_layers,
            entries=cut.num_tokens,
            num_heads=cut.num_heads,
            shard_heads=cut.shard_heads,
            dtype=array.dtype,
        )
    else:
        due = ArrayGeometry.plan(
            num_layers=cut.num_layers,
            num_tokens=cut.num_tokens,
            num_heads=cut.num_heads,
            shard_heads=cut.shard_heads,
            head_size=cut.head_size,
            item_bytes=cut.item_bytes,
        )
    return due.chunk_tokens, due.group_heads


def _shard_problem(
    array: ArrayRecord, geometry: ArrayGeometry, name: str, token_shard: int, size: int | None
) -> str | None:
    if size is None:
        return f"{name} is not among the commit's objects"
    if array.codec is Codec.RAW:
        expected = geometry.raw_shard_bytes(token_shard)
    else:
        try:
            chunk_sizes = array.stored_sizes(geometry, token_shard, name)
        except FormatError as error:
            return str(error)
        largest = geometry.chunk_bytes + _BLOSC_OVERHEAD + CHECKSUM_BYTES
        if chunk_sizes.size and not (
            CHECKSUM_BYTES < chunk_sizes.min() <= chunk_sizes.max() <= largest
        ):
            return f"{name} has chunks of {chunk_sizes.min()} to {chunk_sizes.max()} bytes"
        expected = int(chunk_offsets(geometry, chunk_sizes)[-1]) + geometry.index_bytes
    return None if size == expected else f"{name} has {size} bytes where its chunks take {expected}"
