"""What a caller may call a site: our own names, or TransformerLens's, mapped to a site and a layer.

Knows names only, never data. TransformerLens's `hook_q` and `hook_k` are q and k *before* the
rotary embedding; answering with `rot_q` would be silently wrong for every rotary model, so they
answer only where `pre_q` and `pre_k` were captured. `hook_rot_q`, `hook_rot_k`, `hook_v`, `hook_z`,
`hook_pattern` and `hook_attn_scores` are exactly what is stored or rebuilt here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from store.errors import SiteNotFound
from store.run_format import Site
from store.selection import Choice

SCORES = "scores"
"""Not a stored site, but readable like one: scores before the softmax."""

REBUILT = (Site.PATTERN.value, SCORES)

_TAILS: dict[str, str] = {
    "rot_q": Site.ROT_Q.value,
    "rot_k": Site.ROT_K.value,
    "q": Site.PRE_Q.value,
    "k": Site.PRE_K.value,
    "v": Site.V.value,
    "z": Site.Z.value,
    "pattern": Site.PATTERN.value,
    "attn_scores": SCORES,
}
EXPORT_NAMES: Final[Mapping[str, frozenset[str]]] = {
    "numpy": frozenset({"token_ids", "file", "allow_pickle"}),
    "safetensors": frozenset({"token_ids"}),
    "zarr": frozenset({"prompt", "pos"}),
    "icechunk": frozenset({"prompt", "pos"}),
    "hf-dataset": frozenset({"token_ids", "tokens"}),
}
"""What an export of a kind holds beside sites, or cannot name (the arguments of `np.savez`)."""

_LABELS = frozenset(
    {
        "prompt", "layer", "head", "kv_head", "pos", "query_pos", "key_pos", "d_head", "row",
        "token", "query_token", "key_token", "top", "value", "position", "worker",
        "prompt_id", "num_tokens", "status", "reason", "text",
    }
)  # fmt: skip
"""Dimensions and coordinates of labelled arrays, keys of batches, columns of the prompts table."""

RESERVED: Final = frozenset().union(Site, REBUILT, _TAILS, _LABELS, *EXPORT_NAMES.values())
"""Names that mean something else to a reader, so that nobody's own site may have them."""


def is_free(name: str) -> bool:
    """Return whether a site of a user's own may have this name."""
    return name not in RESERVED and not name.startswith("hook_")


_HOOK = re.compile(r"blocks\.(?P<layer>\d+)\.attn\.hook_(?P<tail>\w+)")

SiteName = str | tuple[str, int] | Site


@dataclass(frozen=True, slots=True)
class NamedSite:
    """A site, and the layer if the name says one. `scores` is the site name of scores."""

    site: str
    layer: int | None = None

    def one_layer(self, chosen: Choice) -> Choice:
        """Return the layer that the name says, or else what was chosen besides it."""
        if self.layer is None:
            return chosen
        if chosen is not None and (
            not isinstance(chosen, (int, np.integer)) or chosen != self.layer
        ):
            raise SiteNotFound(
                f"the name says layer {self.layer}, the selection {chosen}: give one"
            )
        return self.layer


def resolve(name: SiteName, captured: Collection[str]) -> NamedSite:
    """Return what `name` means in a run that captured these sites.

    Takes `z`, `blocks.12.attn.hook_z`, `hook_z`, and `("z", 12)`. Raises `SiteNotFound` naming the
    nearest names, saying why a rotary model's `q` is not here, or for the name of a captured site
    that means something else too (runs of before such names were refused may hold one).
    """
    if isinstance(name, tuple):
        parts: tuple[Any, ...] = name
        if [type(part) for part in parts] != [str, int]:
            raise SiteNotFound(f"{name!r} names no site; give (name, layer), such as ('z', 12)")
        inner = resolve(name[0], captured)
        return NamedSite(inner.site, int(name[1]))
    text = str(name)
    if text in captured and (text == SCORES or text.startswith("hook_")):
        raise SiteNotFound(
            f"a site of this run's probe is called {text!r}, which means something else to a "
            "reader; its arrays can be opened as Zarr, data/<unit>/<attempt>/"
            f"{text}. Attention scores are run.scores(...) or hook_attn_scores"
        )
    match = _HOOK.fullmatch(text)
    layer = int(match["layer"]) if match else None
    tail = match["tail"] if match else text.removeprefix("hook_").removeprefix("attn.hook_")
    if (
        match is None
        and not text.startswith(("hook_", "attn.hook_"))
        and text in _readable(captured)
    ):
        return NamedSite(text)
    site = _TAILS.get(tail, tail)
    if site in _readable(captured):
        return NamedSite(site, layer)
    if site in (Site.PRE_Q, Site.PRE_K):
        rotated = Site.ROT_Q if site == Site.PRE_Q else Site.ROT_K
        raise SiteNotFound(
            f"{text!r} is {tail} before the rotary embedding, which this run did not capture "
            f"({site}); it holds {rotated.value} (after norm and RoPE, what attention uses): "
            f"ask for hook_{rotated.value}, or capture {site}"
        )
    raise SiteNotFound(f"the run holds no site {text!r}; {_nearest(text, captured)}")


def hook_name(site: str, layer: int) -> str:
    """Return TransformerLens's name for a site of a layer, such as `blocks.3.attn.hook_z`."""
    tail = next((tail for tail, ours in _TAILS.items() if ours == site), site)
    return f"blocks.{layer}.attn.hook_{tail}"


def _readable(captured: Collection[str]) -> list[str]:
    """Return what can be read: captured sites, and what is rebuilt from rot_q and rot_k."""
    names = [str(site) for site in captured]
    if {Site.ROT_Q.value, Site.ROT_K.value} <= set(names):
        names += [name for name in REBUILT if name not in names]
    return names


def _nearest(text: str, captured: Collection[str]) -> str:
    names = _readable(captured)
    if text in REBUILT:
        return f"it is rebuilt from rot_q and rot_k, and the run holds {', '.join(names)}"
    tail = text.rsplit(".", 1)[-1].removeprefix("hook_")
    near = difflib.get_close_matches(tail, names, 2, 0.4)
    held = ", ".join(names)
    return f"did you mean {' or '.join(near)}? held: {held}" if near else f"held: {held}"
