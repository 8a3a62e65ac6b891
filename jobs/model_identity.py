"""What a model folder says of itself before any engine starts: its length limit and a fingerprint.

Two figures catch a folder whose weights or tokenizer were exchanged under the same path. The
fingerprint covers the bytes of every small text file and the sizes of all others; the content also
what samples of every file hold (`jobs.local_files`), so that weights trained on in place, of the
same size, are found. A hub name has no folder here; the commit it stands for is its identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capture.errors import ProbeError, UnsupportedModel, UnsupportedOption
from capture.layer_kinds import layer_kinds, refuse_layers
from capture.probe_source import load_probe
from capture.refusals import refuse_model, refuse_options
from capture.settings import EngineSettings
from jobs.config import CaptureConfig, ModelConfig
from jobs.errors import ConfigError
from jobs.local_files import files_of, sampled_content

_SMALL_FILE_BYTES = 64 << 20
_TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


def max_model_len(model: ModelConfig) -> int:
    """Return the most tokens of a sequence: the config's, else what the model's own config says.

    Raises `ConfigError` where neither says it.
    """
    if model.max_model_len is not None:
        return model.max_model_len
    lengths = [
        found[key] for found in _text_configs(model) for key in _LENGTH_KEYS if found.get(key)
    ]
    if not lengths:
        raise ConfigError(
            f"the config of {model.path} states no longest sequence; set model.max_model_len"
        )
    return int(min(lengths))


def vocabulary_size(model: ModelConfig) -> int | None:
    """Return how many token ids the model's embedding has, where its config says so."""
    for found in _text_configs(model):
        if found.get("vocab_size"):
            return int(found["vocab_size"])
    return None


def check_supported(model: ModelConfig, engine: EngineSettings) -> None:
    """Raise `ConfigError` for a model or engine options whose rows could not be right."""
    try:
        refuse_options(engine)
        refuse_model(_text_configs(model)[-1], model.path)
    except (UnsupportedModel, UnsupportedOption) as error:
        raise ConfigError(str(error)) from error


def fingerprint(model: ModelConfig) -> str:
    """Return a SHA-256 that changes when the model's local files do; of a hub name, of its name."""
    digest = hashlib.sha256()
    for place in dict.fromkeys(filter(None, (model.path, model.tokenizer))):
        folder = Path(place)
        if not folder.is_dir():
            digest.update(f"hub\0{place}\0{model.revision}\0".encode())
            continue
        for name, file in files_of(folder):
            size = file.stat().st_size
            digest.update(f"{name}\0{size}\0".encode())
            if file.suffix in _TEXT_SUFFIXES and size <= _SMALL_FILE_BYTES:
                digest.update(file.read_bytes())
    return digest.hexdigest()


def content(model: ModelConfig) -> str | None:
    """Return a SHA-256 of what samples of the model's local files hold; None of a hub name.

    Raises `ConfigError` for a file that cannot be read.
    """
    named = dict.fromkeys(filter(None, (model.path, model.tokenizer)))
    places = [Path(place) for place in named if Path(place).exists()]
    try:
        return sampled_content(places) if places else None
    except OSError as error:
        raise ConfigError(f"the model's files cannot be read: {error}") from error


def hub_commit(model: ModelConfig) -> str | None:
    """Return which commit a hub name stands for now, by where its config.json lies.

    A name without a revision follows the hub's main branch, and that moves. None of a local model,
    and where it cannot be told (a mirror without commits).
    """
    if Path(model.path).exists():
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        file = hf_hub_download(model.path, "config.json", revision=model.revision)
    except (OSError, HfHubHTTPError, HFValidationError):
        return None
    folder = Path(file).parent
    return folder.name if folder.parent.name == "snapshots" else None


def _text_configs(model: ModelConfig) -> list[dict[str, Any]]:
    """The model's config, and the one of its text part for models of several modalities."""
    file = Path(model.path) / "config.json"
    if file.is_file():
        try:
            body = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not readable as JSON: {error}") from error
    else:
        from transformers import AutoConfig

        try:
            body = AutoConfig.from_pretrained(
                model.path,
                revision=model.revision,
                trust_remote_code=model.trust_remote_code,
            ).to_dict()
        except (OSError, ValueError) as error:
            raise ConfigError(f"there is no model at {model.path!r}: {error}") from error
    inner = body.get("text_config")
    return [inner, body] if isinstance(inner, dict) else [body]


_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention layers and heads a model's own config promises."""

    layers: tuple[int, ...]
    """The numbers of the layers with attention."""
    heads: int
    kv_heads: int
    head_size: int
    v_head_size: int
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Kind -> numbers of the layers that have none, of which nothing is captured."""

    def captured(self, chosen: Collection[int] | None) -> tuple[int, ...]:
        """Return the layers that a run captures whose config chose these; None: all that can be."""
        return self.layers if chosen is None else tuple(sorted(set(chosen)))


def attention_shape(model: ModelConfig) -> AttentionShape:
    """Return the model's shape for an estimate; the engine's own word counts once it runs.

    Raises `ConfigError` where the config does not say it.
    """
    config = _text_configs(model)[0]
    kinds = layer_kinds(config)
    stated = config.get("num_hidden_layers") or config.get("n_layer")
    layers = tuple(range(int(stated or 0))) if kinds is None else kinds.attention
    heads = config.get("num_attention_heads") or config.get("n_head")
    if not layers or not heads:
        raise ConfigError(f"the config of {model.path} does not state its layers and heads")
    width = config.get("hidden_size") or config.get("n_embd") or 0
    own_size = config.get("head_dim") or config.get("attention_head_dim")
    head_size = int(own_size or width // heads)
    # By vLLM's own rule: Falcon states multi_query in models that do not follow it.
    one = config.get("multi_query") and not config.get("new_decoder_architecture")
    stated = (config[name] for name in _KV_HEADS if config.get(name))
    kv_heads = 1 if one else next(stated, heads)
    return AttentionShape(
        layers=layers,
        heads=int(heads),
        kv_heads=int(kv_heads),
        head_size=head_size,
        v_head_size=int(config.get("v_head_dim") or head_size),
        others={} if kinds is None else kinds.others,
    )


def layers_without_attention(model: ModelConfig) -> dict[str, list[int]]:
    """Return kind -> layers of which nothing can be captured, by the model's own config."""
    kinds = layer_kinds(_text_configs(model)[0])
    return {} if kinds is None else {kind: list(at) for kind, at in kinds.others.items()}


def captured_layers(model: ModelConfig, capture: CaptureConfig) -> tuple[int, ...]:
    """Return the numbers of the layers that a run of a mixed model captures."""
    kinds = layer_kinds(_text_configs(model)[0])
    return tuple(sorted(capture.layers or (() if kinds is None else kinds.attention)))


def check_chosen(model: ModelConfig, capture: CaptureConfig) -> None:
    """Raise `ConfigError` for layers or query heads that the model's own config does not promise.

    The engine judges layers where the model's config does not state how many there are.
    """
    if capture.layers is None and capture.heads is None:
        return
    kinds = layer_kinds(_text_configs(model)[0])
    if kinds is not None and kinds.others:
        try:
            refuse_layers(kinds, capture.layers, model.path)
        except UnsupportedOption as error:
            raise ConfigError(str(error)) from error
    try:
        shape = attention_shape(model)
    except ConfigError:
        if capture.heads is None:
            return
        raise
    for key, chosen, kind, has in (
        ("layers", capture.layers, "layers", 1 + max(shape.layers)),
        ("heads", capture.heads, "query heads", shape.heads),
    ):
        unknown = [number for number in chosen or () if number >= has]
        if unknown:
            raise ConfigError(
                f"capture.{key} names {unknown}, but {model.path} has {kind} 0 to {has - 1}"
            )


def check_probe(model: ModelConfig, capture: CaptureConfig) -> None:
    """Raise `ConfigError` for a probe that cannot be imported, or gives a site a taken name.

    It is tried on a few rows of zeros of the model's own shape, where the model's config states it.
    """
    if capture.probe is None:
        return
    from capture.probe import check_names

    try:
        load_probe(capture.probe)
        shape = attention_shape(model)
        sizes = (shape.heads, shape.kv_heads, shape.head_size, shape.v_head_size)
        check_names(capture.probe, sizes)
    except ProbeError as error:
        raise ConfigError(str(error)) from error
    except ConfigError:
        return
