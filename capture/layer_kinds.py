"""Which of a model's layers have attention, told from its own config before any engine starts.

Models that mix attention with linear, state-space or convolution layers say it in half a dozen
ways: a word a layer, a letter a layer, a period, a list of numbers. Knows the config as plain
values (`config.json`, or its text part), never an engine; whether a model can be captured is
`capture.refusals`' business, and what a layer computes is read from the loaded model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capture.errors import UnsupportedOption
from store.selection import describe, describe_bare

ATTENTION = "attention"
"""The word for every layer with attention that is captured, full or with a window."""
BOTH = "hybrid"
"""Layers with attention beside or before a state-space part (Falcon-H1, Zamba-2)."""

_WITH = (
    ATTENTION, "full_attention", "sliding_attention", "global", "local", BOTH, "hybrid_sliding",
)  # fmt: skip
_WITHOUT = (
    "linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp", "no_op", "linear",
)  # fmt: skip
_LISTS = ("layer_types", "layers_block_type", "block_types", "layer_block_types")
_LETTERS = {"*": ATTENTION, "M": "mamba", "-": "mlp", "E": "moe"}
_EVERY_FOURTH = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Their configs may leave `full_attention_interval` out, which is 4 then."""


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """What a model's config calls each of its layers, by number."""

    kinds: tuple[str, ...]

    @property
    def attention(self) -> tuple[int, ...]:
        """The numbers of the layers with attention."""
        return tuple(n for n, kind in enumerate(self.kinds) if kind in _WITH)

    @property
    def others(self) -> dict[str, tuple[int, ...]]:
        """Kind -> numbers of the layers without attention; empty where all have it."""
        found: dict[str, tuple[int, ...]] = {}
        for number, kind in enumerate(self.kinds):
            if kind not in _WITH:
                found[kind] = (*found.get(kind, ()), number)
        return found

    @property
    def unknown(self) -> dict[str, tuple[int, ...]]:
        """The same for words that this version does not know: attention of other kinds, or none."""
        return {kind: where for kind, where in self.others.items() if kind not in _WITHOUT}

    @property
    def is_mixed(self) -> bool:
        """Whether some layers have attention and some do not."""
        return bool(self.attention) and bool(self.others)

    def sentence(self) -> str:
        """Return which layers have attention and what the others are, for messages."""
        bare = describe_bare(self.others)
        return f"attention: {describe(self.attention)}" + (f"; {bare}" if bare else "")


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a model's config that describes its decoder."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def layer_kinds(config: Mapping[str, Any]) -> LayerKinds | None:
    """Return the kinds of a decoder's layers; None where its config speaks of one kind only."""
    count = config.get("num_hidden_layers")
    kinds = _listed(config)
    if kinds is None and isinstance(count, int):
        kinds = _counted(config, count)
    if kinds is None:
        return None
    # A list may go on with layers that only speculate; those are not loaded.
    return LayerKinds(tuple(kinds[:count] if isinstance(count, int) and count else kinds))


def _listed(config: Mapping[str, Any]) -> list[str] | None:
    for key in _LISTS:
        if isinstance(words := config.get(key), list | tuple) and words:
            count = config.get("num_hidden_layers")
            if key == "block_types" and isinstance(count, int):
                words = [words[number % len(words)] for number in range(count)]
            return [str(word) for word in words]
    if isinstance(letters := config.get("hybrid_override_pattern"), str) and letters:
        return [_LETTERS.get(letter, letter) for letter in letters]
    if isinstance(blocks := config.get("block_configs"), list | tuple) and blocks:
        return [_block_kind(block) for block in blocks]
    return None


def _block_kind(block: Any) -> str:
    """A block that a search left without attention, or with a linear layer in its place."""
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        return ATTENTION
    if attention.get("no_op"):
        return "no_op"
    return "linear" if attention.get("replace_with_linear") else ATTENTION


def _counted(config: Mapping[str, Any], count: int) -> list[str] | None:
    """Kinds of `count` layers from a period, a list of numbers, or what the model type means."""
    kind = str(config.get("model_type", ""))
    for key, other in (("attn_layer_indices", "mamba"), ("full_attn_idxs", "conv")):
        if isinstance(numbers := config.get(key), list | tuple):
            return [ATTENTION if n in numbers else other for n in range(count)]
    period = config.get("attn_layer_period") or (8 if kind == "jamba" else None)
    if isinstance(period, int) and period > 0:
        stated = config.get("attn_layer_offset")
        offset = stated if isinstance(stated, int) else (4 if kind == "jamba" else 0)
        here = BOTH if kind == "zamba" else ATTENTION
        return [here if n % period == offset % period else "mamba" for n in range(count)]
    interval = config.get("full_attention_interval") or (4 if kind in _EVERY_FOURTH else None)
    if isinstance(interval, int) and interval > 0:
        return [ATTENTION if (n + 1) % interval == 0 else "linear_attention" for n in range(count)]
    step = config.get("mamba_step")
    if kind == "plamo2" and isinstance(step, int) and step > 1:
        last = count <= step // 2
        at = [n == count - 1 if last else n % step == step // 2 for n in range(count)]
        return [ATTENTION if here else "mamba" for here in at]
    return [BOTH] * count if kind == "falcon_h1" else None


def refuse_layers(kinds: LayerKinds | None, wanted: Sequence[int] | None, name: str) -> None:
    """Raise `UnsupportedOption` where layers are asked for that have no attention."""
    if kinds is None or wanted is None:
        return
    bare = [number for number in wanted if number not in kinds.attention]
    if not bare:
        return
    told = [number for number in bare if number < len(kinds.kinds)]
    what = f" (layer {told[0]} is {kinds.kinds[told[0]]})" if told else ""
    raise UnsupportedOption(
        f"capture.layers names {bare}, where {name} has no attention{what}: its attention is in "
        f"layers {describe(kinds.attention)}; name some of those, or leave capture.layers out"
    )
