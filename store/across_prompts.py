"""What a run answers over many prompts at once: streams, reductions, queries.

The other half of `store.run.Run`, which inherits it; knows the run's index and arrays through it.
Everything here streams: memory is bounded by a buffer or a block, not by the run.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xarray as xr
from numpy.typing import DTypeLike, NDArray

from store import reductions, summaries
from store.batches import BLOCK_ROWS, BUFFER_BYTES, Batches, BatchOrder, Unit
from store.errors import PromptNotStored, SiteNotFound
from store.head_scores import Scorer, attention_to_tokens, scorer
from store.objects.protocol import ObjectStore
from store.prompt_blocks import BlockReader, Chosen, choose
from store.prompt_names import Prompt, prompt_list
from store.run_format import LayerSemantics, Site
from store.run_index import RunIndex
from store.selection import Choice
from store.site_names import REBUILT, NamedSite, SiteName
from store.top_rows import top_rows
from store.unit_arrays import UnitArrays

if TYPE_CHECKING:
    from store.run import RunModel, Tokens


class AcrossPrompts:
    """The methods of `Run` that go over many prompts."""

    _objects: ObjectStore
    _index: RunIndex
    _arrays: UnitArrays

    if TYPE_CHECKING:

        @property
        def id(self) -> str: ...

        @property
        def model(self) -> RunModel: ...

        @property
        def sites(self) -> tuple[str, ...]: ...

        @property
        def prompts(self) -> pa.Table: ...

        def tokens(self, prompt: Prompt) -> Tokens: ...

        def _resolve(self, site: SiteName) -> NamedSite: ...

    def batches(
        self,
        sites: Sequence[SiteName],
        *,
        layers: Choice = None,
        heads: Choice = None,
        prompts: Iterable[Prompt] | None = None,
        pos: Choice = None,
        size: int = 256,
        by: Unit = "token",
        shuffle: int | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        worker: tuple[int, int] = (0, 1),
        position: int = 0,
        drop_last: bool = False,
        dtype: DTypeLike | None = None,
    ) -> Batches:
        """Return a stream of batches of `size` rows (`by="token"`) or whole prompts (`"prompt"`).

        `shuffle` is a seed: the same one gives the same stream. Rows mix within `buffer_bytes`,
        which also bounds the memory; a prompt larger than half of it goes alone. `worker` (which,
        of how many) deals the prompts out: every row comes to exactly one worker. `position`
        resumes after the batch that had it. `heads` are key-value heads for rot_k and v. Prompts
        that are named must be stored; None takes all that are, and `.missing` counts the others.
        """
        order = BatchOrder(size, by, shuffle, buffer_bytes, worker, drop_last)
        index = self._index
        readers = [self._row_reader(index, site, layers, heads) for site in sites]
        chosen = _choose(index, readers, prompts, pos, buffer_bytes // 8)
        kept = None if dtype is None else np.dtype(dtype)
        return Batches(chosen, readers, order, position=position, dtype=kept)

    def head_scores(
        self,
        kind: str = "induction",
        *,
        prompts: Iterable[Prompt] | None = None,
        layers: Choice = None,
        heads: Choice = None,
        per_prompt: bool = False,
    ) -> xr.DataArray | pa.Table:
        """Return what each head does on average, dims (layer, head): `kind` names the score.

        `induction`, `previous_token`, `duplicate_token`, `first_token`, `current_token`, `entropy`:
        `store.head_scores` defines them. The mean is over every query that counts, of every prompt.
        `per_prompt` gives an Arrow table instead: prompt_id, layer, head, queries, score. Raises
        `ValueError` for an unknown kind.
        """
        score = scorer(kind)
        return self._head_scores(self._index, score, kind, prompts, layers, heads, per_prompt)

    def attention_to(
        self,
        tokens: Sequence[int] | str,
        *,
        prompts: Iterable[Prompt] | None = None,
        layers: Choice = None,
        heads: Choice = None,
        per_prompt: bool = False,
    ) -> xr.DataArray | pa.Table:
        r"""Return how much each head attends to earlier tokens of a class, as `head_scores` does.

        `tokens` are token ids, or a regular expression that a token's whole string must match,
        such as `r"\s*[.,;:]"`.
        """
        index = self._index
        named = None if prompts is None else prompt_list(prompts)
        ids = _matching_ids(index, tokens, named) if isinstance(tokens, str) else tokens
        score = attention_to_tokens(ids)
        return self._head_scores(index, score, "attention_to", named, layers, heads, per_prompt)

    def moments(
        self,
        site: SiteName,
        *,
        prompts: Iterable[Prompt] | None = None,
        layers: Choice = None,
        heads: Choice = None,
        pos: Choice = None,
    ) -> xr.Dataset:
        """Return `mean` and `std` of a site over all rows, dims (layer, head|kv_head, d_head)."""
        index = self._index
        reader = self._row_reader(index, site, layers, heads)
        chosen = _choose(index, [reader], prompts, pos, reductions.BLOCK_BYTES)
        return reductions.moments(chosen, reader)

    def top_rows(
        self,
        site: SiteName,
        k: int = 10,
        *,
        direction: NDArray[Any] | None = None,
        prompts: Iterable[Prompt] | None = None,
        layers: Choice = None,
        heads: Choice = None,
        pos: Choice = None,
    ) -> pa.Table:
        """Return the k rows with the largest norm, or dot product with `direction` (d_head).

        Columns: prompt_id, pos, token, layer, head, value; descending, over all picked layers and
        heads together. Rows whose value is NaN are left out: a warning says how many, and so does
        the table's `schema.metadata[b"left_out"]`. Raises `SelectionError` for a direction of
        another shape.
        """
        index = self._index
        reader = self._row_reader(index, site, layers, heads)
        chosen = _choose(index, [reader], prompts, pos, reductions.BLOCK_BYTES)
        found = top_rows(chosen, reader, k, direction)
        if found.left_out:
            warnings.warn(
                f"{found.left_out} rows of {reader.site} have no value, for they hold NaN: "
                "they are left out",
                RuntimeWarning,
                stacklevel=2,
            )
        strings = [index.tokens(row.prompt)[1][row.pos] for row in found.rows]
        ids = [index.names.id_of(row.prompt) for row in found.rows]
        table = pa.table(
            {
                "prompt_id": pa.array(ids, pa.string()),
                "pos": pa.array([row.pos for row in found.rows], pa.int64()),
                "token": pa.array(strings, pa.string()),
                "layer": pa.array([row.layer for row in found.rows], pa.int64()),
                "head": pa.array([row.head for row in found.rows], pa.int64()),
                "value": pa.array([row.value for row in found.rows], pa.float64()),
            }
        )
        return table.replace_schema_metadata({"left_out": str(found.left_out)})

    def sql(self, query: str, **tables: pa.Table) -> pa.Table:
        """Return the answer of a DuckDB query over the tables `prompts`, `tokens` and `units`.

        Summaries that were saved (`save_summary`) are there too: as columns of `prompts` where
        they have one row a prompt, else as tables of their names. `tokens` is long (prompt_id,
        pos, token_id, token) and only built if the query names it. `tables` adds Arrow tables of
        yours, such as `head_scores(..., per_prompt=True)`. The query can reach nothing else: no
        files, no network. Needs `pip install attnstore[query]`.
        """
        from store.query import run_sql

        return run_sql(query, self._tables(query), tables)

    def where(self, condition: str) -> list[str]:
        """Return the ids of the prompts that meet an SQL condition, in plan order.

        `run.where("split = 'test' and num_tokens < 512")`; columns are those of `prompts`.
        """
        from store.query import matching_prompts

        return matching_prompts(condition, self._tables(condition)["prompts"])

    def save_summary(self, name: str, table: pa.Table) -> None:
        """Keep a table with a `prompt_id` column beside the run, for `sql` and `where` later on.

        `run.save_summary("induction", run.sql("select prompt_id, max(score) from s group by 1",
        s=run.head_scores("induction", per_prompt=True)))`. Replaces one of the same name; needs
        leave to write to the run's location. The captured data is never touched.
        """
        columns = [*self._index.table().column_names, "status", "reason"]
        summaries.save_summary(self._objects, self.id, name, table, columns)

    @property
    def summaries(self) -> tuple[str, ...]:
        """The names of the summaries kept beside the run; one listing."""
        return tuple(summaries.list_summaries(self._objects))

    def _tables(self, query: str) -> Mapping[str, pa.Table]:
        """Return what a query can name; only what it does name is read."""
        from store.query import token_table, unit_table

        named = {
            name: summaries.read_summary(self._objects, self.id, name)
            for name in self.summaries
            if summaries.is_named_in(query, name)
        }
        built: dict[str, pa.Table] = {
            name: table for name, table in named.items() if not summaries.is_per_prompt(table)
        }
        index = self._index
        built["prompts"] = summaries.with_summaries(index.prompts(), named)
        if re.search(r"\btokens\b", query, re.IGNORECASE):
            built["tokens"] = token_table(index)
        if re.search(r"\bunits\b", query, re.IGNORECASE):
            built["units"] = unit_table(index)
        return built

    def _head_scores(
        self,
        index: RunIndex,
        score: Scorer,
        name: str,
        prompts: Iterable[Prompt] | None,
        layers: Choice,
        heads: Choice,
        per_prompt: bool,
    ) -> xr.DataArray | pa.Table:
        self._resolve("pattern")
        is_rebuilt = {Site.ROT_Q, Site.ROT_K} <= set(self.sites)
        site = Site.ROT_Q if is_rebuilt else Site.PATTERN
        first = self._block_reader(index, site, layers, heads)
        rot_k = self._block_reader(index, Site.ROT_K, layers, None) if is_rebuilt else None
        read_together = [first, rot_k] if rot_k is not None else []
        chosen = _choose(index, read_together, prompts, None, reductions.BLOCK_BYTES)
        if not chosen.blocks:
            raise PromptNotStored("no stored prompt matches: there is nothing to score")
        picked_layers, picked_heads = (
            axis.labels.tolist() for axis in first.axes(chosen.blocks[0])
        )

        def token_ids(row: int) -> NDArray[np.int32]:
            return index.tokens(row)[0]

        if rot_k is not None:
            semantics: Mapping[int, LayerSemantics] = self.model.layers
            stream = reductions.prompt_scores(chosen, first, rot_k, semantics, token_ids, score)
        else:
            stream = reductions.stored_pattern_scores(
                chosen,
                lambda row: self._arrays.of(index.stored(row), Site.PATTERN),
                layers,
                heads,
                token_ids,
                score,
            )
        if per_prompt:
            ids = index.table()["prompt_id"]
            return reductions.score_table(stream, picked_layers, picked_heads, ids)
        return reductions.mean_head_scores(stream, picked_layers, picked_heads, name)

    def _row_reader(
        self, index: RunIndex, site: SiteName, layers: Choice, heads: Choice
    ) -> BlockReader:
        named = self._resolve(site)
        if named.site in REBUILT:
            raise SiteNotFound(f"{named.site} is not streamed in batches; stream rot_q and rot_k")
        return self._block_reader(index, site, layers, heads)

    def _block_reader(
        self, index: RunIndex, site: SiteName, layers: Choice, heads: Choice
    ) -> BlockReader:
        named = self._resolve(site)
        chosen = layers if named.layer is None else [named.layer]
        return BlockReader(index, self._arrays, named.site, chosen, heads)


def _choose(
    index: RunIndex,
    readers: Sequence[BlockReader],
    prompts: Iterable[Prompt] | None,
    pos: Choice,
    block_bytes: int,
) -> Chosen:
    """Cut the wanted prompts into blocks within `block_bytes`, at most `BLOCK_ROWS` rows."""
    named = None if prompts is None else prompt_list(prompts)
    chosen = choose(index, named, pos=pos, block_rows=BLOCK_ROWS)
    if not chosen.blocks:
        return chosen
    row_bytes = sum(reader.row_bytes(chosen.blocks[0]) for reader in readers)
    fitting = max(1, block_bytes // max(1, row_bytes))
    if fitting >= BLOCK_ROWS:
        return chosen
    return choose(index, named, pos=pos, block_rows=fitting)


def _matching_ids(index: RunIndex, expression: str, prompts: Sequence[Prompt] | None) -> list[int]:
    wanted = re.compile(expression)
    rows = range(index.num_prompts) if prompts is None else index.names.rows_of(prompts)
    # A token's string may depend on what stands before it: one match of an id is enough.
    seen: set[tuple[int, str]] = set()
    for row in rows:
        ids, strings = index.tokens(int(row))
        seen.update(zip(ids.tolist(), strings, strict=True))
    found = {number for number, string in seen if wanted.fullmatch(string)}
    if not found:
        raise SiteNotFound(f"no token of these prompts matches {expression!r}")
    return sorted(found)
