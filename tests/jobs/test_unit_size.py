"""The size of units that the config leaves open: four fit the buffers, and a run keeps its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.config import RunConfig
from jobs.config_file import parse_config
from jobs.errors import ConfigError
from jobs.prepare import create_run, extend_run, find_run
from jobs.unit_size import chosen_unit_tokens, with_unit_tokens
from store.errors import FrozenFieldChanged
from store.objects.open import open_store
from store.plan import read_units

Configs = Callable[..., RunConfig]
Prompts = Callable[..., Path]

QWEN3_8B = {
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_size": 4096,
}  # fmt: skip
ROW_BYTES = 737_280
"""Of all heads of q, k, v and z of 36 layers in bfloat16."""


def config_of(folder: Path, shape: dict, **sections: dict) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(shape))
    return parse_config(
        {"output": "x", "prompts": {"source": "p"}, "model": {"path": str(folder)}, **sections}
    )


@pytest.mark.parametrize(
    ("sections", "row_bytes"),
    [
        ({}, ROW_BYTES),
        ({"engine": {"tensor_parallel_size": 2}}, ROW_BYTES // 2),
        ({"engine": {"buffer_bytes": 4 << 30}}, ROW_BYTES),
        ({"capture": {"sites": ["z"], "layers": [3, 4]}}, 2 * 32 * 128 * 2),
        ({"capture": {"heads": [5]}}, 36 * (4 + 1 + 1 + 4) * 128 * 2),
        ({"model_dtype": "float32"}, 2 * ROW_BYTES),
        ({"capture": {"pattern": "stored"}}, ROW_BYTES + 36 * (32 + 8) * 128 * 2),
    ],
)
def test_four_units_fit_and_a_fifth_does_not_unless_the_most_is_reached(
    tmp_path: Path, sections: dict, row_bytes: int
) -> None:
    dtype = sections.pop("model_dtype", None)
    config = config_of(tmp_path, QWEN3_8B, **sections)
    if dtype is not None:
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"dtype": dtype})}
        )
    tokens = chosen_unit_tokens(config)
    budget = config.engine.buffer_bytes
    assert tokens % 256 == 0
    assert 4 * tokens * row_bytes <= budget
    assert tokens == 65_536 or 4 * (tokens + 256) * row_bytes > budget


def test_stored_patterns_keep_units_small(tmp_path: Path) -> None:
    sections = {"capture": {"pattern": "stored", "layers": [0]}}
    assert chosen_unit_tokens(config_of(tmp_path, QWEN3_8B, **sections)) == 16_384


def test_a_model_that_does_not_tell_its_shape_gets_a_careful_size(tmp_path: Path) -> None:
    assert chosen_unit_tokens(config_of(tmp_path, {"model_type": "odd"})) == 16_384


def test_a_size_of_ones_own_is_kept_and_one_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    fits = config_of(tmp_path, QWEN3_8B, capture={"unit_tokens": 40_000})
    assert with_unit_tokens(fits).capture.unit_tokens == 40_000
    too_large = config_of(tmp_path, QWEN3_8B, capture={"unit_tokens": 65_536})
    with pytest.raises(ConfigError, match=f"at most {(32 << 30) // ROW_BYTES}, or") as error:
        with_unit_tokens(too_large)
    assert f"engine.buffer_bytes to {65_536 * ROW_BYTES}" in str(error.value)
    room = config_of(
        tmp_path,
        QWEN3_8B,
        capture={"unit_tokens": 65_536},
        engine={"buffer_bytes": 65_536 * ROW_BYTES},
    )
    assert with_unit_tokens(room).capture.unit_tokens == 65_536


def test_a_run_keeps_the_size_that_it_was_created_with(
    make_config: Configs, write_prompts: Prompts
) -> None:
    prompts = [" ".join(["w1"] * 60)] * 40
    open_size = {"unit_tokens": None}
    row_bytes = 1 * (2 + 2 + 2 + 2) * 8 * 4
    small = make_config(write_prompts(prompts), capture=open_size, engine={"buffer_bytes": 1 << 20})
    assert chosen_unit_tokens(small) == (1 << 20) // 4 // row_bytes // 256 * 256 == 1024
    objects = open_store(small.output)
    run = create_run(objects, small)
    assert run.manifest.frozen["capture.unit_tokens"] == 1024
    assert run.manifest.config["capture"]["unit_tokens"] == 1024
    sizes = read_units(objects, run.segments[0])["num_tokens"].to_pylist()
    assert max(sizes) == 60 * (1024 // 60)
    # A larger buffer later changes neither the run nor what is added to it.
    large = make_config(
        write_prompts(prompts, "more.jsonl"), capture=open_size, engine={"buffer_bytes": 1 << 30}
    )
    found = find_run(objects, large)
    assert found is not None
    assert found.manifest.frozen == run.manifest.frozen
    same = make_config(write_prompts(prompts), capture={"unit_tokens": 1024})
    assert find_run(objects, same) is not None
    other = make_config(write_prompts(prompts), capture={"unit_tokens": 2048})
    with pytest.raises(FrozenFieldChanged, match=r"capture\.unit_tokens"):
        find_run(objects, other)
    renamed = [{"id": f"n{i}", "text": text} for i, text in enumerate(prompts)]
    more = make_config(
        write_prompts(renamed, "more.jsonl"), capture=open_size, engine={"buffer_bytes": 1 << 30}
    )
    extended = extend_run(objects, more, found)
    assert len(extended.segments) == 2
    sizes = read_units(objects, extended.segments[1])["num_tokens"].to_pylist()
    assert max(sizes) == 60 * (1024 // 60)
