"""What a dry run promises is what real engines then store: to the byte, on one rank and several."""

from __future__ import annotations

import json

import numpy as np
import pytest

from capture.settings import CaptureSettings
from jobs.config_file import parse_config
from jobs.estimate import Estimate, Rates, estimate
from jobs.model_identity import attention_shape
from jobs.stored_rows import StoredRows
from jobs.unit_size import prompt_bytes
from store.packed_pattern import entry_starts
from tests.capture.live_capture import Captured
from tests.capture.random_engine import HEADS, KV_HEADS, SIZE, start, task

pytestmark = pytest.mark.engine


def promised(captured: Captured) -> Estimate:
    """The estimate of a capture's own settings and prompts."""
    wanted = captured.wanted
    capture, engine = dict(wanted.capture), dict(wanted.engine)
    generation = capture.pop("generation", None) or {}
    positions = capture.pop("positions", None)
    if (dtype := capture.pop("pattern", None)) is not None:
        capture |= {"pattern": "stored", "pattern_dtype": dtype}
    if positions is not None:
        start, stop = ("" if edge is None else edge for edge in positions.values())
        capture["positions"] = f"{start}:{stop}"
    model = {
        "path": wanted.model,
        "dtype": engine.pop("dtype", "float32"),
        "max_model_len": engine.pop("max_model_len", 512),
    }
    generate = {"tokens": generation.get("max_tokens", 0), "ignore_eos": "ignore_eos" in generation}
    body = {"output": "nowhere", "prompts": {"source": "none"}, "model": model}
    ranks = {"tensor_parallel_size": engine.get("tensor_parallel_size", 1)}
    config = parse_config({**body, "capture": capture, "generate": generate, "engine": ranks})
    number, units, entries, rows = 0, [], [], StoredRows(config)
    for prompts in wanted.units:
        left_out = [str(number + place) in wanted.reasons for place in range(len(prompts))]
        lengths = [0 if out else len(ids) for out, ids in zip(left_out, prompts, strict=True)]
        kept = rows.of_prompts(np.array(lengths))
        units.append(int(kept.sum()))
        entries.append(int(entry_starts(kept)[-1]))
        number += len(prompts)
    shape = attention_shape(config.model)
    return estimate(
        config, shape, units, unit_entries=entries, prompts=number, unusable=0, rates=Rates()
    )


def stored(captured: Captured) -> tuple[dict[str, int], int]:
    """Bytes of shards by site, and objects with the commits themselves, as committed."""
    sites: dict[str, int] = {}
    objects = 0
    for unit in range(len(captured.wanted.units)):
        commit = captured.run._index.commit(unit)
        objects += 1 + len(commit.objects)
        for record in commit.objects:
            site, _, inside = record.name.partition("/")
            if inside.startswith("c/"):
                sites[site] = sites.get(site, 0) + record.bytes
    return sites, objects


@pytest.fixture(params=["all", "ends", "bfloat16", "two ranks", "four ranks", "continued"])
def captured(request: pytest.FixtureRequest) -> Captured:
    one, several = request.getfixturevalue, request.param
    if several in ("all", "ends", "bfloat16"):
        return one("tiny_qwen3_1")["plain" if several == "all" else several]
    if several == "continued":
        return one("tiny_qwen3_on_2")[1]
    return one("tiny_qwen3_2" if several == "two ranks" else "tiny_qwen3_4")


def test_bytes_of_every_site_and_objects_are_exact(captured: Captured) -> None:
    found = promised(captured)
    assert not found.upper_bound
    assert (found.site_bytes, found.objects) == stored(captured)


def test_a_unit_takes_of_the_buffers_what_the_engine_counts(tmp_path) -> None:
    """Before it begins a unit: rows, those kept for its patterns, and the patterns."""
    shape = {
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE, "hidden_size": HEADS * SIZE,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    budget = {"host_bytes": 64 << 20, "slot_bytes": 1 << 20, "buffer_bytes": 1}
    for pattern, heads in ((None, None), ("float16", None), ("uint8", None), ("float32", (3,))):
        settings = CaptureSettings(pattern=pattern, heads=heads, **budget)
        engine = start(tmp_path / "run", settings)
        capture = {"heads": heads, "pattern": "stored" if pattern else "derived"}
        config = parse_config(
            {
                "output": "nowhere",
                "prompts": {"source": "none"},
                "model": {"path": str(tmp_path), "dtype": "float32"},
                "capture": {**capture, "pattern_dtype": pattern or "float16"},
            }
        )
        size = prompt_bytes(config)
        try:
            engine.admit(task(0, 0, [5]))
            engine.admit(task(1, 1, [3, 40, 7]))
            (waiting,) = engine._waiting
            assert waiting.bytes == size(3) + size(40) + size(7)
            assert list(engine._begun_bytes.values()) == [size(5)]
        finally:
            engine.shutdown()


def test_prompts_that_may_end_early_store_no_more_than_was_said(tiny_generated) -> None:
    for name in ("sampled", "long"):
        found = promised(tiny_generated[name])
        sites, objects = stored(tiny_generated[name])
        rows = sum(
            tiny_generated[name].run._index.commit(unit).arrays[0].num_tokens
            for unit in range(len(tiny_generated[name].wanted.units))
        )
        assert found.upper_bound
        assert found.objects >= objects
        assert found.rows >= rows
        assert all(found.site_bytes[site] >= count for site, count in sites.items())
