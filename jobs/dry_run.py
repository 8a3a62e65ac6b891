"""Look before a run starts: what is planned or still missing, estimated. Writes nothing.

Where the run exists its stored plan is used and only missing units count; otherwise the source is
read and tokenized once, as the run itself will do it.
"""

from __future__ import annotations

from jobs.config import RunConfig
from jobs.errors import QuotaExceeded
from jobs.estimate import Estimate, Rates, estimate
from jobs.model_identity import attention_shape
from jobs.packing import UnitPacker
from jobs.plan import make_prompter, read_unit_table
from jobs.prepare import PreparedRun, committed_mask, find_run
from jobs.sources import PromptSource
from jobs.status import read_status
from store.byte_count import human_bytes
from store.objects.open import open_store
from store.objects.protocol import ObjectStore


def preview(config: RunConfig, rates: Rates) -> Estimate:
    """Return the estimate of what `attnstore run` would do now."""
    location = config.location()
    objects = open_store(location.url, location.options)
    found = find_run(objects, config)
    if found is not None:
        return estimate_missing(objects, config, found, rates)
    packer = UnitPacker(config.capture.unit_tokens)
    units: list[int] = []
    prompts = unusable = 0
    more = generated_rows(config)
    for prompt in make_prompter(config).prompts(PromptSource(config.prompts).records()):
        prompts += 1
        unusable += prompt.reason is not None
        if full := packer.add(prompt.rows):
            units.append(full.num_tokens + more * full.num_prompts)
    if last := packer.close():
        units.append(last.num_tokens + more * last.num_prompts)
    shape = attention_shape(config.model)
    return estimate(config, shape, units, prompts=prompts, unusable=unusable, rates=rates)


def estimate_missing(
    objects: ObjectStore, config: RunConfig, run: PreparedRun, rates: Rates
) -> Estimate:
    """Return the estimate of a planned run's missing units."""
    table = read_unit_table(objects, run.segments)
    missing = ~committed_mask(objects, run.num_units)
    rows = table.num_tokens + generated_rows(config) * table.num_prompts
    return estimate(
        config,
        attention_shape(config.model),
        rows[missing],
        prompts=int(table.num_prompts[missing].sum()),
        unusable=0,
        rates=rates,
    )


def generated_rows(config: RunConfig) -> int:
    """Return how many rows a continued prompt adds at most: the last token is never fed."""
    return max(0, config.generate.tokens - 1)


def check_quota(objects: ObjectStore, config: RunConfig, run: PreparedRun) -> None:
    """Raise `QuotaExceeded` where what is stored and what is missing exceed `max_bytes`."""
    if config.max_bytes is None:
        return
    stored = read_status(objects).bytes
    expected = estimate_missing(objects, config, run, Rates()).stored_bytes
    if stored + expected > config.max_bytes:
        raise QuotaExceeded(
            f"the run holds {human_bytes(stored)} and would store about {human_bytes(expected)} "
            f"more; max_bytes is {human_bytes(config.max_bytes)}. Raise max_bytes, take fewer "
            "prompts, sites or layers, or another codec"
        )
