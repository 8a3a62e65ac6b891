"""Tiny random checkpoints of a real architecture, with a tokenizer: models for tests, no download.

Weights are drawn so that attention has something to show: with the usual small initial values every
pattern is flat, and a flat pattern is equal to almost any wrong one. Norm weights are varied for
the same reason, so that a norm left out is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capture.checkpoints.families import FAMILIES
from capture.checkpoints.folder import prepared

WEIGHT_STD = 0.08
NORM_SPREAD = 0.3
VOCABULARY = 320
BOS, EOS = "<|bos|>", "<|eos|>"

# What the tokenizer's few merges are learned from; every other text falls back to bytes.
_TEXT = (
    "The heads of a layer look back at the tokens that came before and choose what to carry "
    "forward. When Mary and John went to the store, John gave a drink to Mary. Some heads copy, "
    "some heads count, and some attend to the first token when there is nothing else to do. "
    "def attend(query, key, value): return softmax(query @ key.T) @ value"
)


def tiny(
    family: str, dest: Path, *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Return `dest`, holding a tiny random checkpoint of `family` (a key of `FAMILIES`).

    `overrides` replace settings of the family's transformers config; `dtype` is that of the saved
    weights. The same arguments give the same weights. Raises `ValueError` for an unknown family.
    """
    if family not in FAMILIES:
        raise ValueError(f"no tiny checkpoint for {family!r}; there are {', '.join(FAMILIES)}")
    settings = {"vocab_size": VOCABULARY, **FAMILIES[family].settings, **overrides}
    recipe = {"family": family, "seed": seed, "dtype": dtype, "version": 2, "settings": settings}

    def build(folder: Path) -> None:
        _save_model(folder, family, settings, seed, dtype)
        _save_tokenizer(folder)

    return prepared(dest, recipe, build)


def tiny_qwen3(dest: Path, **overrides: Any) -> Path:
    """Return `dest`, holding a tiny Qwen3: QK-norm, head size 32 of hidden 128, 8 to 2 heads."""
    return tiny("qwen3", dest, **overrides)


def _save_model(folder: Path, family: str, settings: dict[str, Any], seed: int, dtype: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"model_type": family, "bos_token_id": 0, "eos_token_id": 1, **settings}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            drawn = torch.randn(weight.shape, generator=generator)
            if name.endswith("sinks"):
                weight.copy_(drawn)  # a sink near 0 in every head would hide a swap of heads
            elif "norm" in name or "ln_" in name:
                weight.add_(drawn, alpha=NORM_SPREAD)  # around its start, which is 1 or 0
            else:
                weight.copy_(drawn * WEIGHT_STD)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    fast.save_pretrained(folder)
