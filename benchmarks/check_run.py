"""Make a benchmark's committed units a whole run, and verify every byte of it.

A benchmark admits units by itself, without config or plan; with both added, `store.verify` can hold
what was written against what the commits say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from capture.settings import EngineFacts, UnitTask
from store import keys
from store.objects.open import open_store
from store.plan import PROMPT_FIELDS, UNIT_FIELDS
from store.plan_writer import write_segment
from store.run_format import RunManifest
from store.verify import verify_run


def check_run(folder: Path, facts: EngineFacts, tasks: Sequence[UnitTask]) -> int:
    """Return how many units were verified, deeply. Raises SystemExit naming what is wrong."""
    objects = open_store(str(folder))
    run_id = facts.model.run_id
    run = RunManifest(
        run_id=run_id, created="2026-01-01T00:00:00Z", frozen={}, config={}, versions={}
    )
    objects.create(keys.RUN, run.to_bytes())
    objects.create(keys.MODEL, facts.model.to_bytes())
    ids = [prompt.token_ids for task in tasks for prompt in task.prompts]
    prompts = {
        "prompt_id": [f"p{number}" for number in range(len(ids))],
        "text": [""] * len(ids),
        "token_ids": [one.tolist() for one in ids],
        "token_strings": [[""] * len(one) for one in ids],
        "num_tokens": [len(one) for one in ids],
        "plan_reason": [None] * len(ids),
    }
    units = {
        "unit": [task.unit for task in tasks],
        "first_prompt": [task.first_prompt for task in tasks],
        "num_prompts": [len(task.prompts) for task in tasks],
        "num_tokens": [sum(len(prompt.token_ids) for prompt in task.prompts) for task in tasks],
    }
    write_segment(
        objects,
        run_id=run_id,
        segment=0,
        prompts=pa.table(prompts, schema=PROMPT_FIELDS),
        units=pa.table(units, schema=UNIT_FIELDS),
    )
    report = verify_run(objects, deep=True)
    if report.problems or report.units != len(tasks):
        raise SystemExit(f"what was written does not verify: {report.problems[:5]}")
    return report.units
