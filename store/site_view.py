"""A site of a run before anything is read: `run["z"]`, `run["blocks.12.attn.hook_pattern"]`.

Knows the run it came from and, where the name says one, a layer. Its `repr` shows the dimensions;
only `sel` and `isel` read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Required, TypedDict, Unpack

import xarray as xr
from numpy.typing import DTypeLike

from store.prompt_names import Prompt
from store.run_format import LayerSemantics, Site
from store.selection import Choice, describe
from store.site_names import REBUILT, NamedSite

if TYPE_CHECKING:
    from store.run import Run


class SiteChoices(TypedDict, total=False):
    """What a site may be read by."""

    prompt: Required[Prompt]
    layer: Choice
    head: Choice
    kv_head: Choice
    pos: Choice
    query_pos: Choice
    key_pos: Choice
    dtype: DTypeLike | None


class SiteView:
    """One site, lazily: dims are known, values are read by `sel` (labels) or `isel` (places)."""

    def __init__(self, run: Run, named: NamedSite) -> None:
        self._run = run
        self._named = named

    @property
    def site(self) -> str:
        return self._named.site

    @property
    def dims(self) -> tuple[str, ...]:
        """The dimensions of one prompt's part, the layer left out if the name says it."""
        layer = () if self._named.layer is not None else ("layer",)
        if self.site in REBUILT:
            return (*layer, "head", "query_pos", "key_pos")
        head = Site(self.site).head_dim_name if self.site in set(Site) else "head"
        return (*layer, head, "pos", "d_head")

    def sel(self, **choices: Unpack[SiteChoices]) -> xr.DataArray:
        """Read by label: layer numbers, global heads, positions. Raises as `Run.read` does.

        Takes `prompt`, any of `dims` but the last (`head` also for key-value heads), and `dtype`.
        """
        return self._pick(choices, by_place=False)

    def isel(self, **choices: Unpack[SiteChoices]) -> xr.DataArray:
        """Read by place along each held axis, else as `sel`. Raises as `Run.isel` does."""
        return self._pick(choices, by_place=True)

    def _pick(self, choices: SiteChoices, *, by_place: bool) -> xr.DataArray:
        given = {name for name, choice in choices.items() if choice is not None}
        for name in sorted(given - {"prompt", "layer", "head", "dtype", *self.dims[:-1]}):
            raise TypeError(f"{self.site} has no dimension {name}; it has {', '.join(self.dims)}")
        if "prompt" not in given:
            raise TypeError(f"say which prompt: {self.site} is read one prompt at a time")
        prompt, layer, dtype = choices["prompt"], choices.get("layer"), choices.get("dtype")
        heads = choices.get("head") if "head" in given else choices.get("kv_head")
        layer = self._named.one_layer(layer)
        if self.site in REBUILT:
            picked = (layer, heads, choices.get("query_pos"), choices.get("key_pos"))
            data = self._run._attention_data(self._named, prompt, picked, by_place)
            return data if dtype is None else data.astype(dtype)
        named = self._named.layer
        return self._run.read(
            self.site if named is None else (self.site, named),
            prompt=prompt,
            layer=layer,
            head=heads,
            pos=choices.get("pos"),
            dtype=dtype,
            by_place=by_place,
        )

    def __repr__(self) -> str:
        semantics = next(iter(self._run.model.layers.values()), None)
        sizes = ", ".join(f"{dim}: {self._size(dim, semantics)}" for dim in self.dims)
        where = "" if self._named.layer is None else f" of layer {self._named.layer}"
        rebuilt = ", rebuilt from rot_q and rot_k" if self.site in REBUILT else ""
        return (
            f"<{self.site}{where} in {self._run.url}{rebuilt}>\n"
            f"  one prompt: ({sizes})\n"
            "  nothing read yet; .sel(prompt=..., ...) by label, .isel(...) by place"
        )

    def _size(self, dim: str, semantics: LayerSemantics | None) -> str:
        if dim == "layer":
            return describe(self._run.layers)
        if semantics is None or dim in ("pos", "query_pos", "key_pos"):
            return "tokens"
        if dim == "d_head":
            is_value = self.site in (Site.V, Site.Z)
            return str(semantics.v_head_size if is_value else semantics.head_size)
        return str(semantics.num_kv_heads if dim == "kv_head" else semantics.num_heads)
