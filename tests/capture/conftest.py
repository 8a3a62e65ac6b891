"""Captures that many tests read: each engine starts once a session, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.capture.hf_reference import HFReference
from tests.capture.live_capture import Captured, LiveCapture, capture_live

PROMPTS = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"
SMALL_STEPS = {"max_num_batched_tokens": 128}
"""Prompts are longer than a step, so that they are computed in pieces beside each other."""
EVERYTHING = {
    "sites": ["rot_q", "rot_k", "v", "z", "pre_q", "pre_k"],
    "output_weights": True,
}


@pytest.fixture(scope="session")
def smollm2_units(smollm2_dir: Path) -> list[list[list[int]]]:
    """Three units of real text, shuffled; the last also holds prompts that must be refused.

    Unit 0 holds one text twice, unit 2 holds it a third time.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    texts = [json.loads(line)["text"] for line in PROMPTS.read_text().splitlines()]
    by_length = sorted((ids for text in texts if (ids := tokenizer(text)["input_ids"])), key=len)
    short = [ids for ids in by_length if len(ids) < 90]
    long = [ids for ids in by_length if 130 < len(ids) < 400]
    picked = [*short[:: max(1, len(short) // 8)][:8], long[0], short[0]]
    order = np.random.default_rng(5).permutation(len(picked))
    picked = [picked[place] for place in order]
    twice = picked[1]
    return [
        [*picked[:4], twice],
        picked[4:8],
        [[5, 6, 49_152], picked[8], list(range(600)), twice, picked[9], [7, 8, 9]],
    ]


SMOLLM2_REFUSED = {
    9: "49152 do not all lie in the model's vocabulary",
    11: "vLLM refused the prompt",
    14: "left out",
}


def _smollm2(folder: Path, model: Path, units: list[list[list[int]]], ranks: int) -> LiveCapture:
    engine = {**SMALL_STEPS, "tensor_parallel_size": ranks}
    return LiveCapture(str(folder), str(model), units, engine, EVERYTHING, {"14": "left out"})


def _going_on(
    folder: Path, model: Path, prompts: list[list[int]], ranks: int, **capture: object
) -> LiveCapture:
    engine = {**SMALL_STEPS, "tensor_parallel_size": ranks}
    generation = {"generation": {"max_tokens": 4, "ignore_eos": True}}
    return LiveCapture(str(folder), str(model), [prompts], engine, {**generation, **capture})


@pytest.fixture(scope="session")
def smollm2_on_1(tmp_path_factory, smollm2_dir, smollm2_units) -> list[Captured]:
    """SmolLM2 in float32 on one rank: prompts read, and some continued."""
    folder = tmp_path_factory.mktemp("smollm2-1")
    return capture_live(
        [
            _smollm2(folder / "run", smollm2_dir, smollm2_units, 1),
            _going_on(folder / "generated", smollm2_dir, smollm2_units[0], 1),
        ]
    )


@pytest.fixture(scope="session")
def smollm2_1(smollm2_on_1) -> Captured:
    """SmolLM2 in float32 on one rank."""
    return smollm2_on_1[0]


@pytest.fixture(scope="session")
def smollm2_on_3(tmp_path_factory, smollm2_dir, smollm2_units) -> list[Captured]:
    """The same prompts on three ranks."""
    folder = tmp_path_factory.mktemp("smollm2-3")
    return capture_live(
        [
            _smollm2(folder / "run", smollm2_dir, smollm2_units, 3),
            _going_on(folder / "generated", smollm2_dir, smollm2_units[0][:2], 3),
        ]
    )


@pytest.fixture(scope="session")
def smollm2_3(smollm2_on_3) -> Captured:
    """SmolLM2 on three ranks: three of nine heads each, one of three kv heads."""
    return smollm2_on_3[0]


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_dir: Path):
    reference = HFReference(smollm2_dir)
    yield reference
    reference.close()


@pytest.fixture(scope="session")
def tiny_units() -> list[list[list[int]]]:
    """Three units of random tokens for the tiny checkpoints, from 1 to 200 tokens a prompt."""
    rng = np.random.default_rng(11)
    lengths = [[33, 1, 200, 8], [64, 5, 130], [90, 17]]
    return [[rng.integers(3, 320, n).tolist() for n in unit] for unit in lengths]


@pytest.fixture(scope="session")
def tiny_qwen3_reference(tiny_qwen3_dir: Path):
    reference = HFReference(tiny_qwen3_dir)
    yield reference
    reference.close()


@pytest.fixture(scope="session")
def tiny_qwen3_1(
    tmp_path_factory, tiny_qwen3_dir, tiny_qwen3_bf16_dir, tiny_units
) -> dict[str, Captured]:
    """Tiny Qwen3 on one rank, four engines: as it comes, short of KV cache, ends only, bfloat16."""
    folder = tmp_path_factory.mktemp("tiny-qwen3-1")
    model = str(tiny_qwen3_dir)
    short_of_cache = {
        "max_model_len": 256,
        "max_num_batched_tokens": 128,
        "options": {
            "num_gpu_blocks_override": 10,
            "scheduler_reserve_full_isl": False,
            "block_size": 32,
            "long_prefill_token_threshold": 16,
        },
    }
    wanted = {
        "plain": LiveCapture(
            str(folder / "plain"), model, tiny_units, SMALL_STEPS, EVERYTHING, self_check=True
        ),
        "preempted": LiveCapture(str(folder / "preempted"), model, tiny_units, short_of_cache),
        "ends": LiveCapture(
            str(folder / "ends"),
            model,
            tiny_units,
            SMALL_STEPS,
            {"sites": ["z"], "layers": [0, 2], "positions": {"start": -3, "stop": None}},
        ),
        "bfloat16": LiveCapture(
            str(folder / "bfloat16"),
            str(tiny_qwen3_bf16_dir),
            [[ids] for unit in tiny_units for ids in unit],
            {**SMALL_STEPS, "dtype": "bfloat16"},
            alone=True,
            self_check=True,
            record_bits=True,
        ),
    }
    wanted["probed"] = _probed(folder / "probed", tiny_qwen3_dir, tiny_units, 1, "norms")
    wanted["failing probe"] = _probed(folder / "failing", tiny_qwen3_dir, tiny_units, 1, "fails")
    return dict(zip(wanted, capture_live(list(wanted.values())), strict=True))


def _probed(
    folder: Path, model: Path, units: list[list[list[int]]], ranks: int, name: str
) -> LiveCapture:
    engine = {**SMALL_STEPS, "tensor_parallel_size": ranks}
    sites = ["rot_q", "rot_k", "z"] if name == "norms" else ["pre_q", "z", "proj_in"]
    probe = {"sites": sites, "probe": f"tests.capture.sample_probe:{name}"}
    return LiveCapture(str(folder), str(model), units, engine, probe)


@pytest.fixture(scope="session")
def tiny_probed_1(tiny_qwen3_1) -> Captured:
    """Tiny Qwen3 on one rank with a probe."""
    return tiny_qwen3_1["probed"]


@pytest.fixture(scope="session")
def tiny_probed_2(tiny_qwen3_on_2) -> Captured:
    """Tiny Qwen3 on two ranks with a probe."""
    return tiny_qwen3_on_2[2]


@pytest.fixture(scope="session")
def tiny_qwen3_on_2(tmp_path_factory, tiny_qwen3_dir, tiny_units) -> list[Captured]:
    """Tiny Qwen3 on two ranks: prompts read, and some continued."""
    folder = tmp_path_factory.mktemp("tiny-qwen3-2")
    return capture_live(
        [
            _tiny_ranks(folder / "run", tiny_qwen3_dir, tiny_units, 2),
            _going_on(folder / "generated", tiny_qwen3_dir, tiny_units[0], 2, pattern="float16"),
            _probed(folder / "probed", tiny_qwen3_dir, tiny_units, 2, "norms"),
        ]
    )


@pytest.fixture(scope="session")
def tiny_qwen3_2(tiny_qwen3_on_2) -> Captured:
    """Tiny Qwen3 on two ranks: four of eight heads each, one of two kv heads."""
    return tiny_qwen3_on_2[0]


@pytest.fixture(scope="session")
def tiny_qwen3_4(tmp_path_factory, tiny_qwen3_dir, tiny_units) -> Captured:
    """Tiny Qwen3 on four ranks, patterns stored: each kv head is on two of them."""
    folder = tmp_path_factory.mktemp("tiny-qwen3-4") / "run"
    return capture_live([_tiny_ranks(folder, tiny_qwen3_dir, tiny_units, 4, pattern="float32")])[0]


def _tiny_ranks(
    folder: Path, model: Path, units: list[list[list[int]]], ranks: int, **capture: object
) -> LiveCapture:
    engine = {**SMALL_STEPS, "tensor_parallel_size": ranks}
    return LiveCapture(str(folder), str(model), units, engine, {**EVERYTHING, **capture})


GENERATED_TOKENS = 6


@pytest.fixture(scope="session")
def tiny_generated(tmp_path_factory, tiny_qwen3_dir, tiny_units) -> dict[str, Captured]:
    """Tiny Qwen3 going on after each prompt: greedily, sampled in two ways, and short of cache."""
    folder = tmp_path_factory.mktemp("tiny-generated")
    sampled = {"max_tokens": GENERATED_TOKENS, "temperature": 1.5, "seed": 7}
    short_of_cache = {
        "max_model_len": 256,
        "options": {"num_gpu_blocks_override": 10, "block_size": 32},
    }
    one_unit = [[ids for unit in tiny_units for ids in unit]]

    def wanted(name: str, units, generation, pattern=None, check=False, **engine) -> LiveCapture:
        return LiveCapture(
            str(folder / name),
            str(tiny_qwen3_dir),
            units,
            {**SMALL_STEPS, **engine},
            {
                "generation": {"max_tokens": GENERATED_TOKENS, **generation},
                "pattern": pattern,
            },
            self_check=check,
        )

    captures = {
        "greedy": wanted("greedy", tiny_units, {"ignore_eos": True}, check=True),
        "sampled": wanted("sampled", tiny_units, sampled),
        "sampled alone": wanted("alone", one_unit, sampled, max_num_seqs=1),
        "long": wanted(
            "long", tiny_units, {**sampled, "max_tokens": 120}, "float16", **short_of_cache
        ),
    }
    return dict(zip(captures, capture_live(list(captures.values())), strict=True))
