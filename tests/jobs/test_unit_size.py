"""The size of units that the config leaves open: four fit the buffers, and a run keeps its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jobs.config import RunConfig
from jobs.config_file import parse_config
from jobs.dry_run import preview
from jobs.errors import ConfigError
from jobs.estimate import Rates
from jobs.model_identity import attention_shape
from jobs.packing import UnitPacker
from jobs.prepare import create_run, extend_run, find_run
from jobs.unit_size import (
    MOST_TOKENS,
    chosen_unit_bytes,
    chosen_unit_tokens,
    prompt_bytes,
    with_unit_size,
)
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


STORED = {"pattern": "stored", "layers": [0], "unit_tokens": None}
ENTRY = 32 * 2
"""Bytes of an entry of 32 heads in float16, one layer."""
ROW = 2 * (32 + 8) * 128 * 2 + (32 + 8) * 128 * 2
"""Of one layer, rows kept until the pattern is made among them."""


@pytest.mark.parametrize(
    ("sections", "rows", "row", "entry"),
    [
        ({"capture": STORED}, 100, ROW, ENTRY),
        ({"capture": {**STORED, "pattern_dtype": "uint8"}}, 100, ROW, ENTRY // 2),
        ({"capture": {**STORED, "layers": [0, 5]}}, 100, 2 * ROW, 2 * ENTRY),
        ({"capture": {**STORED, "heads": [5]}}, 100, ROW // 8, ENTRY // 8),
        ({"capture": STORED, "engine": {"tensor_parallel_size": 4}}, 100, ROW // 4, ENTRY // 4),
        ({"capture": STORED, "generate": 21}, 120, ROW, ENTRY),
        ({"capture": {"layers": [0]}, "generate": 21}, 120, 2 * (32 + 8) * 128 * 2, 0),
        ({"capture": {"layers": [0], "sites": ["z"], "positions": "-8:"}}, 8, 32 * 128 * 2, 0),
    ],
)
def test_a_prompt_takes_its_rows_and_the_square_of_them(
    tmp_path: Path, sections: dict, rows: int, row: int, entry: int
) -> None:
    shape = {**QWEN3_8B, "max_position_embeddings": 4096}
    size = prompt_bytes(config_of(tmp_path, shape, **sections))
    assert size(100) == rows * row + rows * (rows + 1) // 2 * entry
    assert size(0) == 0


def test_bytes_count_only_where_tokens_do_not_tell(tmp_path: Path) -> None:
    def chosen(**sections: dict) -> int | None:
        config = with_unit_size(config_of(tmp_path, shape, **sections))
        return config.capture.unit_bytes

    shape = {**QWEN3_8B, "max_position_embeddings": 4096}
    assert chosen() is None
    assert chosen(capture={"pattern": "stored"}) == 8 << 30
    assert chosen(generate={"tokens": 5}) == 8 << 30
    assert chosen(capture={"pattern": "stored", "unit_tokens": 4096}) is None
    assert chosen(capture={"unit_bytes": 12345}) == 12345
    odd = config_of(tmp_path, {"model_type": "odd"}, capture={"pattern": "stored"})
    assert chosen_unit_bytes(odd) is None


def units_of(lengths: list[int], **limits: int) -> list[tuple[int, int]]:
    packer = UnitPacker(
        limits.get("tokens", MOST_TOKENS),
        unit_bytes=limits.get("bytes"),
        bytes_of=lambda rows: rows * rows,
    )
    units = [unit for length in lengths if (unit := packer.add(length))]
    last = packer.close()
    assert last is not None
    return [(unit.num_prompts, unit.num_tokens) for unit in [*units, last]]


def test_a_unit_is_full_when_tokens_or_bytes_are() -> None:
    assert units_of([3] * 5) == [(5, 15)]
    assert units_of([3] * 5, bytes=18) == [(2, 6), (2, 6), (1, 3)]
    assert units_of([3] * 5, bytes=17) == [(1, 3)] * 5
    assert units_of([3] * 5, bytes=18, tokens=3) == [(1, 3)] * 5
    # A prompt that takes more than a unit may is one by itself; those that do not run go along.
    assert units_of([0, 1, 9, 0, 1], bytes=2) == [(2, 1), (1, 9), (2, 1)]


@pytest.mark.parametrize("generated", [0, 9])
def test_planned_units_fit_four_times_with_their_patterns(
    make_config: Configs, write_prompts: Prompts, generated: int
) -> None:
    """Long prompts beside short ones: a unit of as many tokens takes ten times the bytes."""
    lengths = [50, 2, 3, 50, 50, 2, 45, *[4] * 30, 50, 1, 50, 50]
    budget = 4 * 64_000
    config = make_config(
        write_prompts([" ".join(["w1"] * length) for length in lengths]),
        capture={"unit_tokens": None, "pattern": "stored", "pattern_dtype": "float32"},
        engine={"buffer_bytes": 1 << 20},
        generate={"tokens": generated},
    )
    config = config.model_copy(
        update={"engine": config.engine.model_copy(update={"buffer_bytes": budget})}
    )
    before = preview(config, Rates())
    run = create_run(open_store(config.output), config)
    assert run.manifest.frozen["capture.unit_bytes"] == budget // 4
    units = read_units(open_store(config.output), run.segments[0])
    longest = np.minimum(np.array(lengths) + generated, 64) - bool(generated)
    row, entry = (2 + 2 + 2 + 2 + 2 + 2) * 8 * 4, 2 * 4
    taken = longest * row + longest * (longest + 1) // 2 * entry
    sums = [
        int(taken[first : first + count].sum())
        for first, count in zip(
            units["first_prompt"].to_pylist(), units["num_prompts"].to_pylist(), strict=True
        )
    ]
    assert sum(sums) == taken.sum()
    assert max(sums) <= budget // 4
    assert all(one + two > budget // 4 for one, two in pairwise(sums)), sums
    after = preview(config, Rates())
    assert before.units == after.units == len(sums) > 2
    assert before.largest_unit_bytes == after.largest_unit_bytes == max(sums)
    assert before.buffer_bytes == budget


@pytest.mark.parametrize(
    ("config", "kv_heads"),
    [
        ({"num_attention_heads": 4, "hidden_size": 64}, 4),
        ({"num_attention_heads": 4, "hidden_size": 64, "num_key_value_heads": 2}, 2),
        ({"n_head": 4, "n_embd": 64, "n_layer": 2, "multi_query": True}, 1),
        # Falcon-7B and Falcon-40B, as transformers writes them.
        ({"multi_query": True, "num_kv_heads": 4, "new_decoder_architecture": False}, 1),
        ({"multi_query": True, "num_kv_heads": 2, "new_decoder_architecture": True}, 2),
        ({"multi_query": False, "num_kv_heads": 4, "new_decoder_architecture": False}, 4),
        ({"multi_query_group_num": 2}, 2),
    ],
)
def test_kv_heads_are_counted_as_the_engine_does(
    tmp_path: Path, config: dict, kv_heads: int
) -> None:
    usual = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    found = attention_shape(config_of(tmp_path, {**usual, **config}).model)
    assert (found.heads, found.kv_heads, found.head_size) == (4, kv_heads, 16)


def test_a_model_that_does_not_tell_its_shape_gets_a_careful_size(tmp_path: Path) -> None:
    assert chosen_unit_tokens(config_of(tmp_path, {"model_type": "odd"})) == 16_384


def test_a_size_of_ones_own_is_kept_and_one_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    fits = config_of(tmp_path, QWEN3_8B, capture={"unit_tokens": 40_000})
    assert with_unit_size(fits).capture.unit_tokens == 40_000
    too_large = config_of(tmp_path, QWEN3_8B, capture={"unit_tokens": 65_536})
    with pytest.raises(ConfigError, match=f"at most {(32 << 30) // ROW_BYTES}, or") as error:
        with_unit_size(too_large)
    assert f"engine.buffer_bytes to {65_536 * ROW_BYTES}" in str(error.value)
    room = config_of(
        tmp_path,
        QWEN3_8B,
        capture={"unit_tokens": 65_536},
        engine={"buffer_bytes": 65_536 * ROW_BYTES},
    )
    assert with_unit_size(room).capture.unit_tokens == 65_536


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
    assert run.manifest.frozen["capture.unit_bytes"] is None
    extended = extend_run(objects, more, found)
    assert len(extended.segments) == 2
    sizes = read_units(objects, extended.segments[1])["num_tokens"].to_pylist()
    assert max(sizes) == 60 * (1024 // 60)


def test_a_run_keeps_the_bytes_of_its_units_too(
    make_config: Configs, write_prompts: Prompts
) -> None:
    texts = [" ".join(["w1"] * 60)] * 12
    stored = {"unit_tokens": None, "pattern": "stored", "pattern_dtype": "float32"}

    def config_with(name: str, buffer_bytes: int, **more: int) -> RunConfig:
        records = [{"id": f"{name}{i}", "text": text} for i, text in enumerate(texts)]
        source = write_prompts(records, f"{name}.jsonl")
        return make_config(
            source, capture={**stored, **more}, engine={"buffer_bytes": buffer_bytes}
        )

    small = config_with("a", 1 << 20)
    objects = open_store(small.output)
    run = create_run(objects, small)
    per_unit = read_units(objects, run.segments[0])["num_prompts"].to_pylist()
    assert max(per_unit) == (1 << 18) // (60 * 12 * 8 * 4 + 60 * 61 // 2 * 8) < 12
    large = config_with("b", 1 << 30)
    found = find_run(objects, large)
    assert found is not None
    extended = extend_run(objects, large, found)
    assert read_units(objects, extended.segments[1])["num_prompts"].to_pylist() == per_unit
    with pytest.raises(FrozenFieldChanged, match=r"capture\.unit_bytes"):
        find_run(objects, config_with("a", 1 << 20, unit_bytes=77))
