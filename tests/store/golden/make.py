"""Writes golden runs of format version 1. They were written once and must never be written again.

Those without `-tags` are of the time before chunks had tags; this code cannot write them any more.

python -m tests.store.golden.make FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from store.codec import Codec
from store.commit import begin_repair
from store.objects.local import LocalStore
from store.snapshot import write_snapshot
from tests.store.sample_run import RUN_ID, SampleShape, capture, sample_units, write_manifests

LENGTHS = [[7, 0, 270], [1, 40]]
KINDS = [("bfloat16", Codec.RAW), ("float16", Codec.FAST), ("float32", Codec.SMALL)]


def main() -> None:
    for dtype, codec in KINDS:
        folder = Path(sys.argv[1]) / f"{dtype}-{codec}-tags"
        objects = LocalStore(folder / "run")
        shape = SampleShape(
            num_layers=2, num_heads=2, num_kv_heads=1, head_size=4, ranks=2, dtype=dtype,
            codec=codec, sites=("rot_q", "rot_k", "v", "z"),
        )  # fmt: skip
        samples = sample_units(shape, LENGTHS)
        write_manifests(objects, shape, LENGTHS)
        capture(objects, shape, samples[0])
        wrong = sample_units(shape, LENGTHS, seed=99)[1]
        capture(objects, shape, wrong)
        write_snapshot(objects, RUN_ID)
        capture(objects, shape, samples[1], "a1", repair=begin_repair(objects, 1))
        for path in (folder / "run" / ".tmp").iterdir():
            path.unlink()
        (folder / "run" / ".tmp").rmdir()
        for sample in samples:
            for site, values in sample.arrays.items():
                np.save(folder / f"{sample.unit}-{site}.npy", values.view(f"u{values.itemsize}"))


if __name__ == "__main__":
    main()
