"""Model folders: complete or absent, made again when they differ, and true to their recipe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from capture.checkpoints.folder import COMPLETE, is_complete, prepared
from capture.checkpoints.tiny import VOCABULARY, tiny


def one_file(folder: Path) -> None:
    (folder / "weights").write_bytes(b"abc")


def test_a_complete_folder_is_reused(tmp_path: Path) -> None:
    dest = prepared(tmp_path / "model", {"a": 1}, one_file)
    before = (dest / "weights").stat().st_ino

    def never(folder: Path) -> None:
        raise AssertionError("built again")

    assert prepared(dest, {"a": 1}, never) == dest
    assert (dest / "weights").stat().st_ino == before


@pytest.mark.parametrize("damage", ["recipe", "size", "missing", "record"])
def test_a_folder_that_differs_is_made_again(tmp_path: Path, damage: str) -> None:
    dest = prepared(tmp_path / "model", {"a": 1}, one_file)
    recipe = {"a": 2} if damage == "recipe" else {"a": 1}
    if damage == "size":
        (dest / "weights").write_bytes(b"ab")
    if damage == "missing":
        (dest / "weights").unlink()
    if damage == "record":
        (dest / COMPLETE).write_text("{")
    assert not is_complete(dest, recipe)
    prepared(dest, recipe, one_file)
    assert is_complete(dest, recipe)
    assert (dest / "weights").read_bytes() == b"abc"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        one_file(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        prepared(tmp_path / "model", {}, fails)
    assert list(tmp_path.iterdir()) == []


def test_the_loser_of_a_race_gets_the_winners_folder(tmp_path: Path) -> None:
    dest = tmp_path / "model"

    def overtaken(folder: Path) -> None:
        one_file(folder)
        prepared(dest, {"a": 1}, one_file)

    assert prepared(dest, {"a": 1}, overtaken) == dest.resolve()
    assert is_complete(dest, {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tiny_qwen3_has_what_makes_qwen3_hard(tiny_qwen3_dir: Path) -> None:
    from safetensors.numpy import load_file

    config = json.loads((tiny_qwen3_dir / "config.json").read_text())
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    assert config["num_attention_heads"] == 4 * config["num_key_value_heads"]
    weights = load_file(tiny_qwen3_dir / "model.safetensors")
    norms = [
        value
        for name, value in weights.items()
        if name.endswith(("q_norm.weight", "k_norm.weight"))
    ]
    assert len(norms) == 2 * config["num_hidden_layers"]
    assert all(np.std(norm) > 0.1 for norm in norms)
    assert np.std(weights["model.layers.0.self_attn.q_proj.weight"]) == pytest.approx(
        0.08, rel=0.05
    )


def test_tiny_checkpoints_repeat_exactly_and_follow_their_arguments(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    def weights(name: str, **arguments: int) -> dict[str, np.ndarray]:
        return load_file(tiny("llama", tmp_path / name, **arguments) / "model.safetensors")

    first, again, other = weights("a"), weights("b"), weights("c", seed=1)
    assert first.keys() == again.keys()
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["lm_head.weight"], other["lm_head.weight"])
    deeper = weights("d", num_hidden_layers=4)
    assert "model.layers.3.self_attn.q_proj.weight" in deeper


def test_tiny_refuses_an_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="qwen3"):
        tiny("gpt5", tmp_path / "model")


def test_tiny_tokenizer_takes_any_text(tiny_qwen3_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3_dir)
    assert len(tokenizer) == VOCABULARY
    for text in ("The capital of France is", "größer, 東京 и 🐙\n\tx", " "):
        ids = tokenizer(text)["input_ids"]
        assert max(ids) < VOCABULARY
        assert tokenizer.decode(ids) == text


def test_smollm2_completes_a_fact(smollm2_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    assert not hasattr(model.config, "quantization_config")
    with torch.no_grad():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
