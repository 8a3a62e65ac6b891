"""A run opened for reading: `open_run(url)` and what an analyst asks of it. Needs no torch, no GPU.

Knows names, labels and the run's index; leaves bytes to `store.array_reader` and arithmetic to
`store.attention`. Everything returned is an `xarray.DataArray` that carries its layer numbers, head
numbers, positions and token strings, so that a slice can never be mistaken for another.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack

import numpy as np
import pyarrow as pa
import xarray as xr
from numpy.typing import DTypeLike, NDArray

from store import keys, run_card, weights
from store.across_prompts import AcrossPrompts
from store.array_reader import ArrayReader, ReadOptions
from store.checks import SelfCheckFigures, read_checks
from store.chunk_cache import CacheStatistics
from store.due_sites import due_sites
from store.errors import FormatError, ObjectNotFound, RunError
from store.explain import ReadCost
from store.labelled import TokenAxis, label
from store.objects.open import open_store
from store.objects.protocol import ObjectStore
from store.planned_units import kept_positions
from store.prompt_attention import AttentionChoices, PromptAttention
from store.prompt_blocks import BlockReader, choose
from store.prompt_names import Prompt, is_one_prompt
from store.remains import no_run
from store.run_format import LayerSemantics, ModelManifest, RunManifest, Site
from store.run_index import RunIndex, StoredPrompt, looking
from store.sealed_json import MAX_JSON_BYTES
from store.selection import Choice, select
from store.site_names import REBUILT, SCORES, NamedSite, SiteName, resolve
from store.unit_arrays import PromptArray, UnitArrays

if TYPE_CHECKING:
    from store.activation_cache import PromptCache
    from store.site_view import SiteView


class ReadChoices(TypedDict, total=False):
    """What `Run.read` and `Run.isel` take besides the site."""

    prompt: Required[Prompt]
    layer: Choice
    head: Choice
    pos: Choice
    dtype: DTypeLike | None


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model that a run captured, and what each attention layer of it computes."""

    name: str
    revision: str | None
    architecture: str
    dtype: str
    hidden_size: int
    layers: Mapping[int, LayerSemantics]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The sequence that every row of a prompt belongs to: `ids[p]` is the token at position p.

    The last `num_generated` were generated; `logprobs` holds the log-probability of each when it
    was chosen. The last generated token was never fed to the model: it is the one without a row.
    """

    prompt: str
    ids: NDArray[np.int32]
    strings: tuple[str, ...]
    num_generated: int = 0
    logprobs: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


def open_run(
    url: str, options: Mapping[str, Any] | None = None, *, reading: ReadOptions | None = None
) -> Run:
    """Return the run at `url`, a path or any URL that `store.objects.open` knows.

    `options` go to the object store (credentials, endpoint). Reads the run's two manifests and
    lists its commits. Raises `RunNotFound` if there is no run.
    """
    return Run(open_store(url, options), reading or ReadOptions())


class Run(AcrossPrompts):
    """One run, readable while it is still being written. Safe to use from several threads."""

    def __init__(self, objects: ObjectStore, reading: ReadOptions) -> None:
        self._objects = objects
        self._reader = ArrayReader(objects, reading)
        with looking(objects, keys.RUN, keys.MODEL) as (first, begin):
            try:
                data = first.get(keys.RUN, max_bytes=MAX_JSON_BYTES)
            except ObjectNotFound as error:
                raise no_run(objects) from error
            self._manifest = RunManifest.from_bytes(data, keys.RUN)
            kept = kept_positions(self._manifest.config)
            empty = RunIndex(
                objects, self._reader, self._manifest.run_id, kept, due_sites(self._manifest.config)
            )
            self._index = empty.looked(first, begin)
        self._refreshing = threading.Lock()
        self._arrays = UnitArrays(self._reader)
        self._model: RunModel | None = None
        self._projections: dict[int, weights.OutputProjection] = {}

    @property
    def url(self) -> str:
        """Where the run is; carries no credentials."""
        return self._objects.url

    @property
    def id(self) -> str:
        return self._manifest.run_id

    @property
    def config(self) -> dict[str, Any]:
        """The config that the run was started with."""
        return self._manifest.config

    @property
    def checks(self) -> tuple[SelfCheckFigures, ...]:
        """The figures of the run's self-checks, oldest first; reads them each time."""
        return read_checks(self._objects, self.id)

    @property
    def model(self) -> RunModel:
        """The captured model. Raises `RunError` while no engine has started yet."""
        if self._model is None:
            model = self._index.model()
            if model is None:
                raise RunError(f"{self.url} has no {keys.MODEL} yet: no engine has started")
            self._model = _run_model(self._manifest, model)
        return self._model

    @property
    def sites(self) -> tuple[str, ...]:
        """The captured sites. Where rot_q and rot_k are among them, `pattern` can be read too."""
        capture = self._manifest.config.get("capture")
        capture = capture if isinstance(capture, dict) else {}
        declared = capture.get("sites")
        if declared and not capture.get("probe"):
            return tuple(str(site) for site in declared)
        index = self._index
        for unit in index.committed:
            try:
                commit = index.commit(unit)
            except RunError:
                continue  # It is damaged, and the others tell as much.
            if commit is not None and commit.arrays:
                return tuple(array.site for array in commit.arrays)
        return tuple(str(site) for site in declared or ())

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's numbers of the captured layers."""
        capture = self._manifest.config.get("capture")
        chosen = capture.get("layers") if isinstance(capture, dict) else None
        return tuple(sorted(chosen)) if chosen else tuple(sorted(self.model.layers))

    @property
    def prompts(self) -> pa.Table:
        """The prompts table: prompt_id, num_tokens, status, reason, text, then metadata columns.

        `status` is stored, failed, skipped, pending, or damaged where the commit of the prompt's
        unit cannot be read or is of other prompts: then `reason` says why, and a `RuntimeWarning`.
        The first access reads the plan and every commit; later ones are free until `refresh`.
        """
        return self._index.prompts()

    def refresh(self) -> Run:
        """Look again for what was committed since the run was opened; return the run itself.

        A call that another thread has begun goes on with what it saw at its begin, and so does a
        stream of batches.
        """
        with self._refreshing:
            self._index = self._index.refreshed()
        return self

    def tokens(self, prompt: Prompt) -> Tokens:
        """Return a planned prompt's token ids and strings. Raises `PromptNotFound`."""
        index = self._index
        row = index.locate(prompt).row
        ids, strings = index.tokens(row)
        said = index.continuation(row)
        if said is None:
            return Tokens(index.names.id_of(row), ids, tuple(strings))
        generated = len(said.token_ids), tuple(said.logprobs)
        return Tokens(index.names.id_of(row), ids, tuple(strings), *generated)

    def read(
        self,
        site: SiteName,
        *,
        prompt: Prompt,
        layer: Choice = None,
        head: Choice = None,
        pos: Choice = None,
        dtype: DTypeLike | None = None,
        by_place: bool = False,
    ) -> xr.DataArray:
        """Return a captured tensor of one prompt, dims `layer head|kv_head pos d_head`.

        Labels: the model's layer numbers, global heads (key-value heads for rot_k and v),
        positions; negative ones count from the end; a scalar drops its dimension. `dtype` None
        keeps the stored one (bfloat16 as ml_dtypes). `site` may be `pattern` (then `pos` picks
        queries) or a TransformerLens name. `by_place` takes places along each held axis in place of
        labels, as `isel` does. Raises `SiteNotFound`, `PromptNotFound`,
        `PromptNotStored`, `SelectionError`, and `DamagedObject` where stored bytes are not what
        was written.
        """
        index = self._index
        index.begin(prompt)
        named = self._resolve(site)
        layer = named.one_layer(layer)
        if named.site in REBUILT:
            data = self._attention_data(named, prompt, (layer, head, pos, None), by_place)
            return data if dtype is None else data.astype(dtype)
        found = index.found(prompt)
        array = self._arrays.of(found, named.site)
        picked = array.select(layer, head, pos, by_place=by_place, named_layer=named.layer)
        values = array.read(*(axis.indices for axis in picked))
        index.check(found)
        if dtype is not None:
            values = values.astype(dtype, copy=False)
        return label(named.site, values, (*picked, "d_head"), _token_axis(index, array))

    def isel(self, site: SiteName, **choices: Unpack[ReadChoices]) -> xr.DataArray:
        """Return the same as `read`, with places along each held axis instead of labels."""
        return self.read(site, by_place=True, **choices)

    def pattern(
        self,
        prompt: Prompt,
        layer: Choice = None,
        head: Choice = None,
        *,
        query: Choice = None,
        key: Choice = None,
        topk: int | None = None,
        by_place: bool = False,
    ) -> xr.DataArray:
        """Return attention patterns, float32, dims `layer head query_pos key_pos`.

        Rebuilt from rot_q and rot_k by `store.attention`, or as stored; the softmax always runs
        over every key, whichever `key` positions are returned. With `topk` only the so many
        strongest of these keys, largest first: `key_pos` then is a coordinate beside each value
        along `top`, -1 where a query has fewer, and the whole pattern is never held; NaN comes
        last, and `attrs["nans"]` counts it. Raises as `read` does.
        """
        named, choices = NamedSite("pattern"), (layer, head, query, key)
        return self._attention_data(named, prompt, choices, by_place, topk)

    def scores(
        self,
        prompt: Prompt,
        layer: Choice = None,
        head: Choice = None,
        *,
        query: Choice = None,
        key: Choice = None,
        by_place: bool = False,
    ) -> xr.DataArray:
        """Return attention scores before the softmax, as `pattern` does; masked ones are -inf."""
        named, choices = NamedSite("scores"), (layer, head, query, key)
        return self._attention_data(named, prompt, choices, by_place)

    def contribution(
        self, prompt: Prompt, layer: int, head: Choice = None, pos: Choice = None
    ) -> xr.DataArray:
        """Return what heads add to the residual stream, float32, dims `(head) pos d_model`.

        It is z through the head's slice of W_O (`proj_in` in place of z where that was captured:
        gated attention); over all heads it sums to the attention output
        without W_O's bias. Raises `SiteNotFound` where the run holds no W_O, `DamagedObject` or
        `FormatError` where it is another run's or model's, besides what `read` raises.
        """
        source = Site.PROJ_IN if Site.PROJ_IN in self.sites else Site.Z
        index = self._index
        array = self._arrays.of(index.stored(prompt), source)
        layers, heads, places = array.select(layer, head, pos, by_place=False)
        if not layers.scalar:
            raise TypeError(f"layer={layer!r}: a contribution is of one layer; give its number")
        w_o_HDM = self._output_projection(int(layers.labels[0])).w_o_HDM
        z_HPD = array.read(layers.indices[:1], heads.indices, places.indices)[0]
        values = weights.contributions(z_HPD, w_o_HDM[heads.labels])
        axis = _token_axis(index, array)
        data = label("contribution", values, (heads, places, "d_model"), axis)
        return data.assign_coords(layer=int(layers.labels[0]))

    def output_bias(self, layer: int) -> xr.DataArray:
        """Return W_O's bias, dims `d_model`; zeros where the model has none.

        Contributions of all heads and this make up the attention block's output. Raises
        `SiteNotFound` where the run holds no W_O of the layer.
        """
        picked = select("layer", self.layers, layer)
        if not picked.scalar:
            raise TypeError(f"layer={layer!r}: a bias is of one layer; give its number")
        number = int(picked.labels[0])
        projection = self._output_projection(number)
        bias_M = projection.bias_M
        if bias_M is None:
            bias_M = np.zeros(projection.w_o_HDM.shape[2], projection.w_o_HDM.dtype)
        return xr.DataArray(bias_M, {"layer": number}, ("d_model",), name="output_bias")

    def explain(
        self,
        site: SiteName,
        *,
        prompt: Prompt | Sequence[Prompt],
        layer: Choice = None,
        head: Choice = None,
        pos: Choice = None,
    ) -> ReadCost:
        """Return what reading this would cost: calls, requests, bytes; reads no array.

        A list of prompts is planned as batches read it: neighbours of a unit together. Nothing is
        taken to be cached. For a pattern or scores it is the cost of their rot_q and rot_k.
        """
        index, named = self._index, self._resolve(site)
        layer = named.one_layer(layer)
        if named.site in REBUILT:
            prompts = [prompt] if is_one_prompt(prompt) else prompt
            choices = (layer, head, pos, None)
            picks = [self._attention(named, index.stored(one), choices) for one in prompts]
            return ReadCost.total(pick.cost() for pick in picks)
        if is_one_prompt(prompt):
            array = self._arrays.of(index.stored(prompt), named.site)
            picked = array.select(layer, head, pos, by_place=False)
            return array.cost(*(axis.indices for axis in picked))
        reader = BlockReader(index, self._arrays, named.site, layer, head)
        chosen = choose(index, prompt, pos=pos, block_rows=1 << 40)
        return ReadCost.total(reader.cost(block) for block in chosen.blocks)

    def cache(
        self, prompt: Prompt, *, batch_dim: bool = True, dtype: DTypeLike = np.float32
    ) -> PromptCache:
        """Return a prompt as a mapping from TransformerLens names to arrays, read when asked for.

        Shapes are TransformerLens's, with a batch of 1 unless `batch_dim` is False. For tensors:
        `store.torch_adapter.TorchCache(run.cache(prompt))`.
        """
        from store.activation_cache import PromptCache

        return PromptCache(self, prompt, batch_dim=batch_dim, dtype=dtype)

    def cache_statistics(self) -> CacheStatistics:
        """Return what the chunk cache of this open run holds, and how often it answered."""
        return self._reader.cache.statistics()

    def overview(self) -> dict[str, Any]:
        """Return the run in one flat row: model, dtype, sites, layers, prompts, stored, bytes."""
        return self._facts().as_row()

    def __getitem__(self, site: SiteName) -> SiteView:
        """Return a view that has read nothing: `run["z"]`, `run["blocks.12.attn.hook_z"]`."""
        from store.site_view import SiteView

        return SiteView(self, self._resolve(site))

    def __repr__(self) -> str:
        return run_card.as_text(self._facts())

    def _repr_html_(self) -> str:
        return run_card.as_html(self._facts())

    def _facts(self) -> run_card.RunFacts:
        index = self._index
        try:
            model: RunModel | None = self.model
            layers = self.layers
        except RunError:
            model, layers = None, ()
        return run_card.RunFacts.gather(
            self.url,
            name=_model_field(self._manifest, "path") or "unknown model",
            dtype=None if model is None else model.dtype,
            sites=self.sites,
            layers=layers,
            without_attention=self._manifest.layers_without_attention,
            semantics=None if model is None else next(iter(model.layers.values()), None),
            chosen_heads=_chosen_heads(self.config),
            planned=(index.num_units, index.num_prompts),
            rows=index.states.rows(),
            damaged=(len(index.states.unreadable()), index.states.unreadable_prompts()),
        )

    def _resolve(self, site: SiteName) -> NamedSite:
        return resolve(site, self.sites or tuple(Site))

    def _output_projection(self, layer: int) -> weights.OutputProjection:
        if layer not in self._projections:
            found = weights.read_output_projection(self._objects, layer, self.id)
            model = self._index.model()
            if model is not None and layer in self.model.layers:
                problem = weights.projection_contradiction(found, self.model.layers[layer], model)
                if problem is not None:
                    raise FormatError(f"W_O of layer {layer} {problem}; run `attnstore verify`")
            self._projections[layer] = found
        return self._projections[layer]

    def _attention_data(
        self,
        named: NamedSite,
        prompt: Prompt,
        choices: AttentionChoices,
        by_place: bool,
        topk: int | None = None,
    ) -> xr.DataArray:
        resolve(named.site, [site for site in self.sites or tuple(Site) if site != SCORES])
        index = self._index
        attention = self._attention(named, index.stored(prompt), choices, by_place=by_place)
        tokens = _token_axis(index, attention.arrays[0])
        return attention.labelled(tokens) if topk is None else attention.strongest(topk, tokens)

    def _attention(
        self,
        named: NamedSite,
        stored: StoredPrompt,
        choices: AttentionChoices,
        *,
        by_place: bool = False,
    ) -> PromptAttention:
        layers = self.model.layers
        return PromptAttention.of(named, stored, self._arrays, layers, choices, by_place=by_place)


def _token_axis(index: RunIndex, array: PromptArray) -> TokenAxis:
    _, strings = index.tokens(array.row)
    return TokenAxis(index.names.id_of(array.row), strings)


def _chosen_heads(config: Mapping[str, Any]) -> list[int] | None:
    """Return the query heads that the config asked for; None where it asked for all."""
    capture = config.get("capture")
    heads = capture.get("heads") if isinstance(capture, dict) else None
    chosen = isinstance(heads, list) and all(isinstance(head, int) for head in heads)
    return heads if chosen else None


def _model_field(manifest: RunManifest, name: str) -> str | None:
    model = manifest.config.get("model")
    if isinstance(model, str):
        return model if name == "path" else None
    value = model.get(name) if isinstance(model, dict) else None
    return None if value is None else str(value)


def _run_model(manifest: RunManifest, model: ModelManifest) -> RunModel:
    return RunModel(
        name=_model_field(manifest, "path") or model.architecture,
        revision=_model_field(manifest, "revision"),
        architecture=model.architecture,
        dtype=model.dtype,
        hidden_size=model.hidden_size,
        layers={layer.layer: layer for layer in model.layers},
    )
