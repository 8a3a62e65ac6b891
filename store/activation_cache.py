"""A prompt as TransformerLens's analysis code expects it: a mapping from hook names to arrays.

Knows one run and one prompt; reads each array when it is first asked for and keeps it. Shapes are
TransformerLens's: `[batch, pos, head, d_head]` for rows, `[batch, head, query, key]` for patterns
and scores, with a batch of 1 unless it is left out. Key-value heads are not repeated. What was not
captured is not in the mapping; `q` and `k` before the rotary embedding answer with an error that
says so, never with the rotated ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from store.errors import SiteNotFound
from store.site_names import REBUILT, SiteName, hook_name, resolve

if TYPE_CHECKING:
    from store.prompt_names import Prompt
    from store.run import Run


class PromptCache(Mapping[SiteName, NDArray[Any]]):
    """`cache["blocks.3.attn.hook_z"]`, `cache["z", 3]`, `cache["pattern", 3]` of one prompt."""

    def __init__(
        self, run: Run, prompt: Prompt, *, batch_dim: bool = True, dtype: DTypeLike = np.float32
    ) -> None:
        self._run = run
        self.prompt = run.tokens(prompt).prompt
        self.has_batch_dim = batch_dim
        self._dtype = dtype
        self._kept: dict[tuple[str, int], NDArray[Any]] = {}
        self._sites = run.sites
        readable = [site for site in self._sites if site not in REBUILT]
        if {"rot_q", "rot_k"} <= set(self._sites) or "pattern" in self._sites:
            readable += REBUILT
        self._names = {
            hook_name(site, layer): (site, layer) for layer in run.layers for site in readable
        }

    def __getitem__(self, name: SiteName) -> NDArray[Any]:
        """Return the array of a hook name or (short name, layer). Raises `SiteNotFound`.

        It is the one that is kept, so it cannot be written to: copy it to change it.
        """
        named = resolve(name, self._sites)
        if named.layer is None:
            raise SiteNotFound(f"{name!r} names no layer; ask for ({name!r}, layer)")
        layers = self._run.layers
        layer = layers[named.layer] if -len(layers) <= named.layer < 0 else named.layer
        key = (named.site, layer)
        if key not in self._kept:
            self._kept[key] = self._read(named.site, layer)
        return self._kept[key]

    def __iter__(self) -> Iterator[SiteName]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        try:
            named = resolve(name, self._sites)  # type: ignore[arg-type]
        except SiteNotFound:
            return False
        return named.layer in self._run.layers

    def stack_activation(self, name: str) -> NDArray[Any]:
        """Return a site of every captured layer, stacked along a new first axis."""
        return np.stack([self[name, layer] for layer in self._run.layers])

    def remove_batch_dim(self) -> PromptCache:
        """Return the same cache without the batch axis of 1."""
        return PromptCache(self._run, self.prompt, batch_dim=False, dtype=self._dtype)

    def _read(self, site: str, layer: int) -> NDArray[Any]:
        data = self._run.read((site, layer), prompt=self.prompt, dtype=self._dtype)
        values = data.values if site in REBUILT else data.values.swapaxes(0, 1)
        kept = np.ascontiguousarray(values[None] if self.has_batch_dim else values)
        kept.setflags(write=False)
        return kept

    def __repr__(self) -> str:
        first = next(iter(self._names), "nothing")
        return f"<PromptCache of {self.prompt!r}: {len(self)} arrays, such as {first!r}>"
