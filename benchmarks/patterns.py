"""How fast a shard writer makes stored patterns of prompts of one length, and of mixed ones.

One layer's rows of rot_q and rot_k go to a real writer (`capture.shard_loop`) as they lie in the
slab of a step, one step after the other; it makes the packed patterns and puts them into a memory
store. No engine runs. Times are the writer's own stages, in one thread, and the processor time that
the thread took for all of them; a figure is the median of its rounds. BLAS is kept to one thread,
as in a writer process: with more, other work on the cores multiplies every figure.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.patterns --json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from capture.pattern_rows import PatternRecipe, first_entries
from capture.rows import Run, UnitLayout
from capture.shard_loop import OpenUnit, SealUnit, ShardLoop, Tap
from capture.slabs import Entry, TapShape
from store.codec import Codec
from store.objects.obstore_store import ObstoreStore
from store.packed_pattern import plan_pattern
from store.run_format import LayerSemantics

LENGTHS = (8, 32, 64, 512, 2048)
UNIT_TOKENS, STEP_TOKENS, STEP_PROMPTS = 16_384, 8_192, 512
MIXED = "4 to 96"


@dataclass(frozen=True)
class Shape:
    """A layer as one rank computes it, and the dtype of its rows."""

    heads: int
    kv_heads: int
    head_size: int
    dtype: str

    def semantics(self) -> LayerSemantics:
        return LayerSemantics(
            layer=0, module="m", num_heads=self.heads, num_kv_heads=self.kv_heads,
            head_size=self.head_size, v_head_size=self.head_size, scale=self.head_size**-0.5,
        )  # fmt: skip

    def tap(self, heads: int) -> TapShape:
        item = 4 if self.dtype == "float32" else 2
        group = max(g for g in (4, 2, 1) if heads % g == 0)
        return TapShape(heads, self.head_size, item, group, 256)


SHAPES = {
    "smollm2-135m": Shape(9, 3, 64, "float32"),
    "qwen3-8b": Shape(32, 8, 128, "bfloat16"),
}


def steps(lengths: list[int]) -> list[int]:
    """Return how many of the prompts, in order, are in each step."""
    found, tokens, prompts = [], 0, 0
    for length in lengths:
        if prompts and (tokens + length > STEP_TOKENS or prompts == STEP_PROMPTS):
            found.append(prompts)
            tokens = prompts = 0
        tokens, prompts = tokens + length, prompts + 1
    return [*found, prompts]


def staged(shape: TapShape, rows: int, dtype: str, seed: int) -> np.ndarray:
    """Return a slab that holds so many rows of a tap, uint8 [bytes]."""
    values = np.random.default_rng(seed).standard_normal(
        shape.staged_bytes(rows) // shape.item_bytes, np.float32
    )
    return values.astype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16).view(np.uint8)


def one_round(shape: Shape, lengths: list[int], seed: int) -> dict[str, float]:
    """Return the writer's seconds by stage for one unit."""
    recipe = PatternRecipe(
        0, 1, tuple(range(shape.heads)), tuple(range(shape.kv_heads)), shape.semantics(),
        shape.dtype, "float16",
    )  # fmt: skip
    taps = {
        0: Tap("rot_q", 0, 0, 0, writes=False),
        1: Tap("rot_k", 0, 0, 0, writes=False),
        2: Tap("pattern", 0, 0, 0, recipe=recipe),
    }
    loop = ShardLoop(0, taps, Codec.RAW, ObstoreStore("memory:///"))
    layout = UnitLayout.plan(0, 0, "a0", lengths)
    entries = int(first_entries(layout)[-1])
    cut = plan_pattern(
        num_layers=1, entries=entries, num_heads=shape.heads, shard_heads=shape.heads,
        dtype="float16",
    )  # fmt: skip
    loop.handle(OpenUnit(layout, {"pattern": cut}))
    first, cpu = 0, 0.0
    for count in steps(lengths):
        rows = sum(lengths[first : first + count])
        run = Run(0, int(layout.first_row[first]), rows, 0)
        for number, heads in enumerate((shape.heads, shape.kv_heads)):
            tap = shape.tap(heads)
            slab = staged(tap, rows, shape.dtype, seed + number)
            begun = time.thread_time()
            loop.place([Entry(number, 0, tap, rows, (run,))], slab)
            cpu += time.thread_time() - begun
        first += count
    report = loop.handle(SealUnit(0))
    assert report is not None
    assert report.error is None, report.error
    assert report.rows["pattern"] == entries
    return {**report.timings, "cpu": cpu}


def measure(
    lengths_of: dict[str, list[int]], shapes: dict[str, Shape], rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return figures by shape and lengths; the lengths take turns, round after round."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, shape in shapes.items():
        timings: dict[str, list[dict[str, float]]] = {label: [] for label in lengths_of}
        for number in range(rounds):
            for label, lengths in lengths_of.items():
                timings[label].append(one_round(shape, lengths, number))
        found[name] = {}
        for label, lengths in lengths_of.items():
            entries = sum(length * (length + 1) // 2 for length in lengths)
            median = {
                stage: statistics.median(one.get(stage, 0.0) for one in timings[label])
                for stage in ("copy", "pattern", "encode", "put")
            }
            making = median["copy"] + median["pattern"]
            cpu = statistics.median(one["cpu"] for one in timings[label])
            found[name][label] = {
                "prompts": len(lengths),
                "entries": entries,
                **{f"{stage}_seconds": seconds for stage, seconds in median.items()},
                "cpu_microseconds_a_prompt": 1e6 * cpu / len(lengths),
                "making_microseconds_a_prompt": 1e6 * making / len(lengths),
                "making_nanoseconds_an_entry_and_head": 1e9 * making / entries / shape.heads,
            }
    return found


def units(tokens: int) -> dict[str, list[int]]:
    """Return the lengths of the prompts of a unit of so many tokens, by what they are called."""
    found = {str(length): [length] * max(1, tokens // length) for length in LENGTHS}
    drawn = np.random.default_rng(0).integers(4, 97, tokens // 50)
    return {**found, MIXED: drawn.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=UNIT_TOKENS, help="of a unit")
    arguments = parser.parse_args()
    figures = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "processor": platform.processor() or platform.machine(),
        **measure(units(arguments.tokens), SHAPES, arguments.rounds),
    }
    if arguments.json:
        print(json.dumps(figures, indent=1))
        return
    for name in SHAPES:
        for label, one in figures[name].items():
            print(
                f"{name}, {label} tokens: {one['making_microseconds_a_prompt']:.0f} us a prompt, "
                f"{one['making_nanoseconds_an_entry_and_head']:.2f} ns an entry and head"
            )


if __name__ == "__main__":
    main()
