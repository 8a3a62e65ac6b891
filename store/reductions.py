"""One number, or one small table, from all of a run: streamed block by block, never loaded whole.

Knows blocks of prompts, the layers' semantics and tokens; leaves formulas to `store.attention` and
`store.head_scores`. Sums are float64. Memory is one block's rows and one tile of pattern.

Legend: L layers, N heads, R rows, D head size, Q queries of a tile, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xarray as xr
from numpy.typing import NDArray

from store import attention
from store.attention import HeadRows
from store.errors import NothingToReduce
from store.head_scores import Scorer, Tile
from store.prompt_blocks import Block, BlockReader, Chosen, split_rows
from store.run_format import LayerSemantics
from store.selection import AxisSelection, Choice, select
from store.stored_pattern import read_pattern
from store.unit_arrays import PromptArray

Indices = NDArray[np.int64]
Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]
TokenIds = Callable[[int], NDArray[np.int32]]
PatternRows = Callable[[slice, int], Float32]
"""(which queries, how many keys) -> one layer's pattern [N, Q, K]."""

BLOCK_BYTES = 64 << 20
TILE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PromptScore:
    """A prompt's sum of a score over its counted queries, [L, N], and how many they are."""

    row: int
    total: Float64
    queries: int


def prompt_scores(
    chosen: Chosen,
    rot_q: BlockReader,
    rot_k: BlockReader,
    semantics: Mapping[int, LayerSemantics],
    token_ids: TokenIds,
    score: Scorer,
) -> Iterator[PromptScore]:
    """Yield every prompt's score sums, in plan order. `rot_k` must read every kv head."""
    for block in chosen.blocks:
        layers, heads = rot_q.axes(block)
        _, kv_heads = rot_k.axes(block)
        sums = {p.row: np.zeros((len(layers), len(heads))) for p in block.prompts()}
        counts = dict.fromkeys(sums, 0)
        row_bytes = rot_q.row_bytes(block) + rot_k.row_bytes(block)
        for some in _layer_parts(len(layers), block.num_rows * row_bytes):
            q_LNRD, k_LGRD = rot_q.read(block, layers=some), rot_k.read(block, layers=some)
            for place, layer in enumerate(some.tolist()):
                layer_semantics = semantics[int(layers.labels[layer])]
                for prompt, rows in split_rows(block):
                    q = HeadRows(q_LNRD[place, :, rows], heads.labels.tolist(), prompt.positions)
                    k = HeadRows(k_LGRD[place, :, rows], kv_heads.labels.tolist(), prompt.positions)
                    total, queries = _score(
                        _rebuilt(layer_semantics, q, k),
                        q.positions,
                        len(q.heads),
                        token_ids(prompt.row),
                        score,
                    )
                    sums[prompt.row][layer] = total
                    counts[prompt.row] = queries
        for row, total in sums.items():
            yield PromptScore(row, total, counts[row])


def stored_pattern_scores(
    chosen: Chosen,
    array_of: Callable[[int], PromptArray],
    layers: Choice,
    heads: Choice,
    token_ids: TokenIds,
    score: Scorer,
) -> Iterator[PromptScore]:
    """Yield what `prompt_scores` does, from patterns that are stored: `array_of` a prompt's row."""
    for row in (prompt.row for block in chosen.blocks for prompt in block.prompts()):
        array = array_of(row)
        picked_layers, picked_heads, _ = array.select(layers, heads, None, by_place=False)
        total = np.zeros((len(picked_layers), len(picked_heads)))
        queries = 0
        for place in range(len(picked_layers)):
            rows_of = _stored(array, picked_layers.part(slice(place, place + 1)), picked_heads)
            total[place], queries = _score(
                rows_of, array.positions, len(picked_heads), token_ids(row), score
            )
        yield PromptScore(row, total, queries)


def _stored(array: PromptArray, layer: AxisSelection, heads: AxisSelection) -> PatternRows:
    """Return what reads the pattern of some of one layer's queries over its first keys."""

    def pattern(rows: slice, last: int) -> Float32:
        queries = select("query_pos", array.positions, rows, by_place=True)
        keys = select("key_pos", array.positions, slice(0, last))
        pattern_NQK: Float32 = read_pattern(array, (layer, heads, queries, keys))[0]
        return pattern_NQK

    return pattern


def _rebuilt(semantics: LayerSemantics, rot_q: HeadRows, rot_k: HeadRows) -> PatternRows:
    """Return what rebuilds the pattern of some of one layer's queries over its first keys."""

    def pattern(rows: slice, last: int) -> Float32:
        keys = HeadRows(rot_k.values[:, :last], rot_k.heads, rot_k.positions[:last])
        queries = HeadRows(rot_q.values[:, rows], rot_q.heads, rot_q.positions[rows])
        return attention.pattern(semantics, queries, keys)

    return pattern


def _score(
    pattern: PatternRows,
    positions: Indices,
    num_heads: int,
    ids: NDArray[np.int32],
    score: Scorer,
) -> tuple[Float64, int]:
    """Return one layer's [N] score sums over a prompt's queries, and how many counted."""
    tile_rows = max(1, TILE_BYTES // (4 * max(1, len(positions)) * max(1, num_heads)))
    total = np.zeros(num_heads)
    counted = 0
    for start in range(0, len(positions), tile_rows):
        queries = positions[start : start + tile_rows]
        # Keys after the tile's last query are masked anyway; leaving them out halves the work.
        last = int(queries.max()) + 1
        pattern_NQK = pattern(slice(start, start + len(queries)), last)
        scores, counts = score(Tile(pattern_NQK, queries, ids[:last]))
        total += scores[:, counts].sum(axis=1, dtype=np.float64)
        counted += int(counts.sum())
    return total, counted


def mean_head_scores(
    scores: Iterator[PromptScore], layers: Sequence[int], heads: Sequence[int], kind: str
) -> xr.DataArray:
    """Return the mean over all counted queries, dims (layer, head); NaN if none counted."""
    total = np.zeros((len(layers), len(heads)))
    queries = prompts = 0
    for score in scores:
        total += score.total
        queries += score.queries
        prompts += 1
    mean = total / (queries or np.nan)
    return xr.DataArray(
        mean,
        dims=("layer", "head"),
        coords={"layer": list(layers), "head": list(heads)},
        name=kind,
        attrs={"queries": queries, "prompts": prompts},
    )


def score_table(
    scores: Iterator[PromptScore], layers: Sequence[int], heads: Sequence[int], ids: pa.ChunkedArray
) -> pa.Table:
    """Return one row per prompt, layer and head: prompt_id, layer, head, queries, mean score."""
    parts = []
    for score in scores:
        size = len(layers) * len(heads)
        # Null where nothing counted; NaN, which a query must not take for that, stays NaN.
        mean = score.total.ravel() / (score.queries or np.nan)
        parts.append(
            pa.table(
                {
                    "prompt_id": pa.repeat(ids[score.row], size),
                    "layer": pa.array(np.repeat(np.asarray(layers, np.int64), len(heads))),
                    "head": pa.array(np.tile(np.asarray(heads, np.int64), len(layers))),
                    "queries": pa.array(np.full(size, score.queries, np.int64)),
                    "score": pa.array(mean) if score.queries else pa.nulls(size, pa.float64()),
                }
            )
        )
    return pa.concat_tables(parts) if parts else _empty_scores()


def moments(chosen: Chosen, reader: BlockReader) -> xr.Dataset:
    """Return mean and std over all rows, dims (layer, head|kv_head, d_head), and the row count.

    Merged block by block as in Chan, Golub and LeVeque 1979, which does not lose digits when the
    mean is large. A component that is NaN or infinite in any row has mean and std NaN, and no other
    has; `attrs["not_finite"]` counts such values.
    """
    count = not_finite = 0
    mean: Float64 | None = None
    squares: Float64 | None = None
    axes: Any = None
    for block, layer_rows in _blocks(chosen, reader):
        axes = axes or reader.axes(block)
        values = layer_rows.astype(np.float64)
        is_finite = np.isfinite(values)
        not_finite += int(values.size - np.count_nonzero(is_finite))
        # From NaN no sum comes back, from infinities some do.
        values[~is_finite] = np.nan
        rows = values.shape[2]
        block_mean = values.mean(axis=2)
        block_squares = ((values - block_mean[:, :, None]) ** 2).sum(axis=2)
        if mean is None or squares is None:
            mean, squares, count = block_mean, block_squares, rows
            continue
        delta = block_mean - mean
        both = count + rows
        mean = mean + delta * (rows / both)
        squares = squares + block_squares + delta**2 * (count * rows / both)
        count = both
    if mean is None or squares is None:
        raise NothingToReduce("no stored prompt matches: there is nothing to reduce")
    layers, heads = axes
    dims = ("layer", heads.name, "d_head")
    return xr.Dataset(
        {"mean": (dims, mean), "std": (dims, np.sqrt(squares / count))},
        coords={"layer": layers.labels, heads.name: heads.labels},
        attrs={"rows": count, "site": reader.site, "not_finite": not_finite},
    )


def _blocks(chosen: Chosen, reader: BlockReader) -> Iterator[tuple[Block, NDArray[Any]]]:
    """Yield whole blocks of one site; the caller's `chosen` bounds their size."""
    for block in chosen.blocks:
        yield block, reader.read(block)


def _layer_parts(num_layers: int, block_bytes: int) -> list[Indices]:
    """Cut the layers so that one part of a block stays within `BLOCK_BYTES`."""
    parts = max(1, min(num_layers, -(-block_bytes // BLOCK_BYTES)))
    return [part for part in np.array_split(np.arange(num_layers), parts) if len(part)]


def _empty_scores() -> pa.Table:
    return pa.schema(
        [
            ("prompt_id", pa.string()),
            ("layer", pa.int64()),
            ("head", pa.int64()),
            ("queries", pa.int64()),
            ("score", pa.float64()),
        ]
    ).empty_table()
