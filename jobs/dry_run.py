"""Look before a run starts: what is planned or still missing, estimated. Writes nothing.

Where the run exists its stored plan is used and only missing units count; otherwise the source is
read and tokenized once, as the run itself will do it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jobs.config import PatternMode, RunConfig
from jobs.errors import QuotaExceeded, SourceError
from jobs.estimate import Estimate, Rates, estimate
from jobs.model_identity import attention_shape, check_chosen, check_probe, check_supported
from jobs.plan import make_prompter, read_unit_table, refuse_repeated
from jobs.prepare import PreparedRun, committed_mask, find_run
from jobs.prompt_ids import PromptIds
from jobs.schedule import UnitTable
from jobs.sources import PromptSource
from jobs.status import read_status
from jobs.stored_rows import Counts, StoredRows
from jobs.unit_size import unit_packer, with_unit_size
from store.byte_count import human_bytes
from store.objects.open import open_store
from store.objects.protocol import ObjectStore
from store.packed_pattern import entry_starts
from store.plan import read_prompt_file


def preview(config: RunConfig, rates: Rates) -> Estimate:
    """Return the estimate of what `attnstore run` would do now."""
    check_supported(config.model, config.engine_settings())
    check_chosen(config.model, config.capture)
    check_probe(config.model, config.capture)
    location = config.location()
    objects = open_store(location.url, location.options)
    found = find_run(objects, config)
    if found is not None:
        return estimate_missing(objects, config, found, rates)
    packer, stored = unit_packer(with_unit_size(config)), StoredRows(config)
    lengths: list[int] = []
    units: list[int] = []
    entries: list[int] = []
    prompts = unusable = tokens = cut_short = 0

    def close() -> None:
        nonlocal cut_short
        cut_short += int(stored.are_cut_short(np.array(lengths, np.int64)).sum())
        rows = stored.of_prompts(np.array(lengths, np.int64))
        units.append(int(rows.sum()))
        entries.append(int(entry_starts(rows)[-1]))
        lengths.clear()

    prompter = make_prompter(config)
    with PromptIds() as ids:
        for prompt in prompter.prompts(PromptSource(config.prompts).records()):
            ids.add(prompt.prompt_id, prompts)
            prompts += 1
            unusable += prompt.reason is not None
            if packer.add(prompt.rows):
                close()
            lengths.append(prompt.rows)
            tokens += prompt.rows
        refuse_repeated(ids, config, prompter, 0)
    if not packer.close():
        raise SourceError(f"{config.prompts.source!r} holds no prompts")
    close()
    shape = attention_shape(config.model)
    return estimate(
        config,
        shape,
        units,
        unit_entries=entries,
        tokens=None if config.generate.tokens else tokens,
        prompts=prompts,
        unusable=unusable,
        cut_short=cut_short,
        rates=rates,
    )


def estimate_missing(
    objects: ObjectStore, config: RunConfig, run: PreparedRun, rates: Rates
) -> Estimate:
    """Return the estimate of a planned run's missing units.

    Where rows are not just tokens it reads the plan's prompts, file by file.
    """
    table = read_unit_table(objects, run.segments)
    missing = ~committed_mask(objects, run)
    stored = StoredRows(config)
    if stored.all_tokens:
        return _estimate(config, table, table.num_tokens, missing, rates)
    rows, entries, cut_short = _unit_rows(objects, run, table, stored)
    return _estimate(
        config, table, rows, missing, rates, entries, cut_short=int(cut_short[missing].sum())
    )


def check_quota(objects: ObjectStore, config: RunConfig, run: PreparedRun) -> None:
    """Raise `QuotaExceeded` where what is stored and what is missing exceed `max_bytes`."""
    if config.max_bytes is None:
        return
    held = read_status(objects).bytes
    table, stored = read_unit_table(objects, run.segments), StoredRows(config)
    missing = ~committed_mask(objects, run)
    most = stored.of_units(table.num_tokens, table.num_prompts)
    expected = _estimate(config, table, most, missing, Rates()).stored_bytes
    patterns = config.capture.pattern is PatternMode.STORED
    if patterns or (held + expected > config.max_bytes and not stored.all_tokens):
        # So far the most that rows can take; the exact count reads every prompt of the plan.
        expected = estimate_missing(objects, config, run, Rates()).stored_bytes
    if held + expected > config.max_bytes:
        raise QuotaExceeded(
            f"the run holds {human_bytes(held)} and would store about {human_bytes(expected)} "
            f"more; max_bytes is {human_bytes(config.max_bytes)}. Raise max_bytes, take fewer "
            "prompts, sites or layers, or another codec"
        )


def _estimate(
    config: RunConfig,
    table: UnitTable,
    rows: Counts,
    missing: NDArray[np.bool_],
    rates: Rates,
    entries: Counts | None = None,
    *,
    cut_short: int = 0,
) -> Estimate:
    return estimate(
        config,
        attention_shape(config.model),
        rows[missing],
        unit_entries=() if entries is None else entries[missing].tolist(),
        tokens=None if config.generate.tokens else int(table.num_tokens[missing].sum()),
        prompts=int(table.num_prompts[missing].sum()),
        unusable=0,
        cut_short=cut_short,
        rates=rates,
    )


def _unit_rows(
    objects: ObjectStore, run: PreparedRun, table: UnitTable, stored: StoredRows
) -> tuple[Counts, Counts, Counts]:
    """Each unit's rows, entries of packed patterns and prompts cut short, from their lengths."""
    units, entries, cut = (np.zeros(len(table), np.int64) for _ in range(3))
    for manifest in run.segments:
        number = manifest.first_prompt
        for place in range(len(manifest.prompts)):
            prompts = read_prompt_file(objects, manifest, place, ["num_tokens", "plan_reason"])
            lengths = prompts["num_tokens"].to_numpy().astype(np.int64)
            lengths[~prompts["plan_reason"].is_null().to_numpy()] = 0
            numbers = number + np.arange(len(lengths))
            unit = np.searchsorted(table.first_prompt, numbers, side="right") - 1
            rows = stored.of_prompts(lengths)
            np.add.at(units, unit, rows)
            np.add.at(entries, unit, rows * (rows + 1) // 2)
            np.add.at(cut, unit, stored.are_cut_short(lengths))
            number += len(lengths)
    return units, entries, cut
