"""A site of a run before anything is read: `run["z"]`, `run["blocks.12.attn.hook_pattern"]`.

Knows the run it came from and, where the name says one, a layer. Its `repr` shows the dimensions;
only `sel` and `isel` read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xarray as xr
from numpy.typing import DTypeLike

from store.run_format import LayerSemantics, Site
from store.run_index import Prompt
from store.selection import Choice, describe
from store.site_names import REBUILT, NamedSite, SiteName

if TYPE_CHECKING:
    from store.run import Run


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

    def sel(
        self,
        *,
        prompt: Prompt,
        layer: Choice = None,
        head: Choice = None,
        kv_head: Choice = None,
        pos: Choice = None,
        query_pos: Choice = None,
        key_pos: Choice = None,
        dtype: DTypeLike | None = None,
    ) -> xr.DataArray:
        """Read by label: layer numbers, global heads, positions. Raises as `Run.read` does."""
        return self._pick(
            prompt, layer, head, kv_head, pos, query_pos, key_pos, dtype, by_place=False
        )

    def isel(
        self,
        *,
        prompt: Prompt,
        layer: Choice = None,
        head: Choice = None,
        kv_head: Choice = None,
        pos: Choice = None,
        query_pos: Choice = None,
        key_pos: Choice = None,
        dtype: DTypeLike | None = None,
    ) -> xr.DataArray:
        """Read by place along each held axis. Raises as `Run.isel` does."""
        return self._pick(
            prompt, layer, head, kv_head, pos, query_pos, key_pos, dtype, by_place=True
        )

    def _pick(
        self,
        prompt: Prompt,
        layer: Choice,
        head: Choice,
        kv_head: Choice,
        pos: Choice,
        query_pos: Choice,
        key_pos: Choice,
        dtype: DTypeLike | None,
        *,
        by_place: bool,
    ) -> xr.DataArray:
        given = {"head": head, "kv_head": kv_head, "pos": pos, "query_pos": query_pos}
        given["key_pos"] = key_pos
        for dim, choice in given.items():
            if choice is not None and dim not in self.dims and dim != "head":
                raise TypeError(
                    f"{self.site} has no dimension {dim}; it has {', '.join(self.dims)}"
                )
        heads = head if kv_head is None else kv_head
        name: SiteName = (
            (self.site, self._named.layer) if self._named.layer is not None else self.site
        )
        if self.site in REBUILT:
            read = self._run.pattern if self.site == "pattern" else self._run.scores
            chosen: Choice = layer if self._named.layer is None else self._named.layer
            data = read(prompt, chosen, heads, query=query_pos, key=key_pos, by_place=by_place)
            return data if dtype is None else data.astype(dtype)
        method = self._run.isel if by_place else self._run.read
        return method(name, prompt=prompt, layer=layer, head=heads, pos=pos, dtype=dtype)

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
