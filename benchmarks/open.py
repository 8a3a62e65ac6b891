"""What opening a huge run costs: 10^6 units in a snapshot and 1,000 commits after it.

The run is simulated: its plan, its snapshot, its first commit and the newer ones are real objects.
The data and the older commits are left out; opening never touches them. A process of its own opens
the run, so that its time and peak memory are those of a reader that has just started.

    python -m benchmarks.open --json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from store import keys
from store.committed_units import COLUMNS
from store.objects.local import LocalStore
from store.parquet_file import write_parquet
from store.plan import PROMPT_FIELDS, UNIT_FIELDS
from store.plan_writer import write_segment
from store.run_format import (
    ArrayRecord,
    Commit,
    LayerSemantics,
    ModelManifest,
    ObjectRecord,
    Outcome,
    PromptOutcomes,
    RankRecord,
    RunManifest,
    SnapshotManifest,
)
from store.snapshot import EXCEPTIONS_FILE, MANIFEST, UNITS_FILE

RUN_ID = "0" * 16
LAYERS, SITES, ROWS = 36, ("rot_q", "rot_k", "v", "z"), 16_384
SEGMENT_UNITS = 100_000
READER = """
import json, sys, time
begun = time.perf_counter()
from store import open_run
imported = time.perf_counter()
run = open_run(sys.argv[1])
opened = time.perf_counter()
text = repr(run)
described = time.perf_counter()
# Not getrusage: its peak outlives exec, so it would be that of whoever started this process.
status = open("/proc/self/status").read()
peak_kb = int(status.split("VmHWM:")[1].split()[0])
print(json.dumps({
    "import_seconds": imported - begun,
    "open_seconds": opened - imported,
    "repr_seconds": described - opened,
    "peak_mb": peak_kb / 1024,
}))
"""


def simulate(folder: Path, units: int, newer: int) -> int:
    """Write the run and return how many bytes its newer commits have."""
    objects = LocalStore(folder)
    run = RunManifest(run_id=RUN_ID, created="", frozen={}, config={}, versions={})
    objects.create(keys.RUN, run.to_bytes())
    layers = [
        LayerSemantics(
            layer=layer, module=f"layers.{layer}", num_heads=32, num_kv_heads=8, head_size=128,
            v_head_size=128, scale=0.088,
        )
        for layer in range(LAYERS)
    ]  # fmt: skip
    model = ModelManifest(
        run_id=RUN_ID, architecture="Simulated", dtype="bfloat16", hidden_size=4096, layers=layers
    )
    objects.create(keys.MODEL, model.to_bytes())
    write_plan(objects, units + newer)
    write_old_units(objects, units)
    total = 0
    for unit in (0, *range(units, units + newer)):
        data = commit_of(unit).to_bytes()
        total += len(data) if unit else 0
        path = folder / keys.commit_key(unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return total


def write_plan(objects: LocalStore, units: int) -> None:
    """Write segments of units of one prompt each."""
    for segment, first in enumerate(range(0, units, SEGMENT_UNITS)):
        count = min(SEGMENT_UNITS, units - first)
        numbers = range(first, first + count)
        prompts = pa.table(
            {
                "prompt_id": [f"p{number}" for number in numbers],
                "text": [f"prompt {number}" for number in numbers],
                "token_ids": [[1, 2, 3, 4]] * count,
                "token_strings": [["a", "b", "c", "d"]] * count,
                "num_tokens": [ROWS] * count,
                "plan_reason": [None] * count,
            },
            schema=PROMPT_FIELDS,
        )
        columns = [numbers, numbers, [1] * count, [ROWS] * count]
        table = pa.table([pa.array(c, pa.int64()) for c in columns], schema=UNIT_FIELDS)
        write_segment(objects, run_id=RUN_ID, segment=segment, prompts=prompts, units=table)


def write_old_units(objects: LocalStore, units: int) -> None:
    """Write the snapshot of units 0 up to `units`, one prompt in a hundred failed."""
    number = np.arange(units)
    failed = (number % 100 == 0).astype(np.int64)
    values = {
        "unit": number, "repair": number * 0, "first_prompt": number, "num_prompts": number * 0 + 1,
        "stored": 1 - failed, "failed": failed, "skipped": number * 0, "rows": number * 0 + ROWS,
        "bytes": number * 0 + (12 << 30),
    }  # fmt: skip
    prefix = f"{keys.SNAPSHOTS}00000000-simulated/"
    bad = np.flatnonzero(failed)
    exceptions = pa.table(
        {
            "unit": bad, "prompt": bad, "outcome": ["failed"] * len(bad),
            "reason": ["longer than the model allows"] * len(bad),
        }
    )  # fmt: skip
    files = [
        write_parquet(objects, prefix, UNITS_FILE, pa.table({n: values[n] for n in COLUMNS})),
        write_parquet(objects, prefix, EXCEPTIONS_FILE, exceptions),
    ]
    manifest = SnapshotManifest(
        run_id=RUN_ID, name="00000000-simulated", created="", units=units,
        complete_folders=units // keys.UNITS_PER_FOLDER, files=files,
    )  # fmt: skip
    objects.create(prefix + MANIFEST, manifest.to_bytes())


def commit_of(unit: int) -> Commit:
    """Return a commit as a 16,384-token unit of a 36-layer model has it."""
    arrays, records = [], [ObjectRecord(name="zarr.json", bytes=120, crc32c="0" * 8)]
    for site in SITES:
        is_kv = site in ("rot_k", "v")
        heads, head_dim = (8, "kv_head") if is_kv else (32, "head")
        array = ArrayRecord(
            site=site, dtype="bfloat16", dims=["layer", "token", head_dim, "d_head"],
            layers=list(range(LAYERS)), heads=list(range(heads)), num_tokens=ROWS, head_size=128,
            shard_tokens=min(ROWS, (64 << 20) // (heads * 256)), shard_heads=heads,
            chunk_tokens=256, group_heads=4, codec="raw", tags=True,
        )  # fmt: skip
        geometry = array.geometry()
        arrays.append(array)
        records.append(ObjectRecord(name=f"{site}/zarr.json", bytes=1500, crc32c="0" * 8))
        records += [
            ObjectRecord(
                name=array.shard_name(*place),
                bytes=geometry.raw_shard_bytes(place[1]),
                crc32c="0" * 8,
            )
            for place in geometry.shard_places()
        ]
    return Commit(
        run_id=RUN_ID, unit=unit, attempt="simulated", first_prompt=unit, arrays=arrays,
        objects=records,
        prompts=PromptOutcomes(
            outcome=[Outcome.STORED], first_row=[0], num_rows=[ROWS], first_position=[0]
        ),
        ranks=[RankRecord(rank=0, heads={}, objects=len(records), bytes=0)],
    )  # fmt: skip


def measure(units: int, newer: int, rounds: int, place: Path) -> dict[str, Any]:
    """Simulate a run, open it `rounds` times and return the slowest figures."""
    folder = Path(tempfile.mkdtemp(prefix="attnstore-open-", dir=place))
    try:
        commit_bytes = simulate(folder / "run", units, newer)
        found = []
        for _ in range(rounds):
            command = [sys.executable, "-c", READER, str(folder / "run")]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout))
    finally:
        shutil.rmtree(folder)
    worst = {name: max(one[name] for one in found) for name in found[0]}
    return {"units": units, "newer_commits": newer, "newer_commit_bytes": commit_bytes, **worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--units", type=int, default=1_000_000)
    parser.add_argument("--newer", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    figures = measure(arguments.units, arguments.newer, arguments.rounds, arguments.place)
    if arguments.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
