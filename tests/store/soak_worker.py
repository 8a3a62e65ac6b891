"""A process of the soak test: captures units over and over, racing its siblings, until it is
killed.

python -m tests.store.soak_worker URL OPTIONS_JSON UNITS SEED
"""

from __future__ import annotations

import json
import random
import sys

from store.commit import commit_unit, committed_units
from store.errors import StoreError
from store.objects.open import open_store
from tests.store.sample_run import SampleShape, make_unit, write_unit

SHAPE = SampleShape(num_layers=1, num_heads=2, num_kv_heads=1, head_size=4, dtype="bfloat16")
LENGTHS = [5, 0, 300]


def values_of(unit: int, attempt: str) -> dict:
    """Return the values that this attempt stores: every attempt has its own."""
    seed = int(attempt.partition("-")[2])
    return make_unit(SHAPE, unit, 3 * unit, LENGTHS, seed).arrays


def main() -> None:
    url, options, units, seed = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    objects = open_store(url, options)
    chance = random.Random(seed)
    tries = 0
    while True:
        missing = sorted(set(range(units)) - set(committed_units(objects)))
        if not missing:
            return
        unit = chance.choice(missing[:4])
        tries += 1
        attempt = f"a-{seed}{tries:04d}"
        sample = make_unit(SHAPE, unit, 3 * unit, LENGTHS, int(f"{seed}{tries:04d}"))
        try:
            commit_unit(objects, write_unit(objects, SHAPE, sample, attempt))
        except StoreError as error:
            print(error, file=sys.stderr)
            raise
        print(unit, attempt, flush=True)


if __name__ == "__main__":
    main()
