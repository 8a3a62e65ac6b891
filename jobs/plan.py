"""From a prompt source to a stored plan segment: prompts with their token ids, and units.

One pass over the source, a file's worth of prompts in memory at a time. The same source, model and
config give the same segment, byte for byte and hash for hash. Knows no engine and no Ray.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from jobs import model_identity
from jobs.config import RunConfig, public_url
from jobs.errors import InputsChanged, SourceError
from jobs.packing import PlannedUnit
from jobs.prompt import Prompt, Prompter, load_tokenizer
from jobs.prompt_ids import PromptIds
from jobs.schedule import UnitTable
from jobs.sources import PromptSource
from jobs.unit_size import unit_packer
from store.objects.protocol import ObjectStore
from store.plan import PROMPT_FIELDS, UNIT_FIELDS, read_prompt_file, read_units
from store.plan_contents import READER_COLUMNS
from store.plan_writer import PROMPTS_PER_FILE, TOKENS_PER_FILE, SegmentWriter
from store.run_format import PlanInput, PlanManifest

RESERVED_COLUMNS = frozenset([*PROMPT_FIELDS.names, *READER_COLUMNS])


@dataclass(slots=True)
class PlanProgress:
    """How far planning has come."""

    prompts: int = 0
    tokens: int = 0
    unusable: int = 0


def make_prompter(config: RunConfig) -> Prompter:
    """Return what turns source records into prompts for this config's model."""
    model = config.model
    tokenizer = load_tokenizer(
        model.tokenizer or model.path, model.revision, model.trust_remote_code
    )
    return Prompter(
        config.prompts,
        tokenizer,
        model_identity.max_model_len(model),
        model_identity.vocabulary_size(model),
    )


def write_plan(
    objects: ObjectStore,
    config: RunConfig,
    *,
    run_id: str,
    before: Sequence[PlanManifest] = (),
    progress: Callable[[PlanProgress], None] = lambda _progress: None,
    planned: Callable[[], None] = lambda: None,
) -> PlanManifest:
    """Plan the config's source as the segment after `before` and store it.

    `planned` is called once nothing but the manifest, which makes it so, is left to write.
    Raises `SourceError` for a source without prompts, or with an id used twice (in it, or by an
    earlier segment), naming the ids.
    """
    source = PromptSource(config.prompts)
    last = before[-1] if before else None
    first_prompt = last.first_prompt + last.num_prompts if last else 0
    first_unit = last.first_unit + last.num_units if last else 0
    packer = unit_packer(config, first_unit, first_prompt)
    writer = SegmentWriter(objects, run_id=run_id, segment=len(before))
    units: list[PlannedUnit] = []
    done = PlanProgress()
    prompter = make_prompter(config)
    with PromptIds() as ids:
        for place, prompt_id in enumerate(_ids_before(objects, before)):
            ids.add(prompt_id, place)
        for batch in _files(prompter.prompts(source.records(), first_prompt)):
            for prompt in batch:
                ids.add(prompt.prompt_id, first_prompt + done.prompts)
                if full := packer.add(prompt.rows):
                    units.append(full)
                done.prompts += 1
                done.tokens += prompt.rows
                done.unusable += prompt.reason is not None
            writer.add_prompts(prompt_table(batch))
            progress(done)
        if last_unit := packer.close():
            units.append(last_unit)
        if not units:
            raise SourceError(f"{config.prompts.source!r} holds no prompts")
        refuse_repeated(ids, config, prompter, first_prompt)
    inputs = [
        PlanInput(url=public_url(f.url), bytes=f.bytes, sha256=source.sha256(f), stamp=f.stamp)
        for f in source.files
    ]
    return writer.finish(unit_table(units), inputs, planned=planned)


def check_inputs(config: RunConfig, segments: Sequence[PlanManifest]) -> str | None:
    """Refuse a source that is not what one of the segments was planned from.

    Returns a sentence for the log where the source cannot be read: the stored plan is all that a
    resume needs. Raises `InputsChanged`, naming the file.
    """
    try:
        source = PromptSource(config.prompts)
    except SourceError as error:
        return f"going on from the stored plan alone: {error}"
    differences = [_difference(source, segment.inputs) for segment in segments]
    if all(differences):
        raise InputsChanged(
            f"the source {config.prompts.source!r} is not what this run was planned from: "
            f"{differences[-1]}. Give the run another output, restore the source, or add the new "
            "prompts with --extend"
        )
    return None


def is_planned(config: RunConfig, segments: Sequence[PlanManifest]) -> bool:
    """Return whether the config's source is what one of the segments was planned from."""
    source = PromptSource(config.prompts)
    return any(_difference(source, segment.inputs) is None for segment in segments)


def _difference(source: PromptSource, planned: Sequence[PlanInput]) -> str | None:
    """The first difference, or None. Files of the same size and stamp are taken as unchanged, a
    file by another name is the same if its bytes are."""
    if len(source.files) != len(planned):
        return f"it has {len(source.files)} files, it had {len(planned)}"
    for file, before in zip(source.files, planned, strict=True):
        same_place = public_url(file.url) == before.url and file.bytes == before.bytes
        if same_place and file.stamp and file.stamp == before.stamp:
            continue
        if file.bytes != before.bytes:
            return f"{file.url} has {file.bytes} bytes, it had {before.bytes}"
        now = source.sha256(file)
        if now != before.sha256:
            return f"{file.url} has sha256 {now[:12]}, it had {before.sha256[:12]}"
    return None


def prompt_table(prompts: Sequence[Prompt]) -> pa.Table:
    """Return prompts as the plan stores them: `PROMPT_FIELDS`, then the metadata columns."""
    columns: dict[str, pa.Array] = {
        "prompt_id": pa.array([p.prompt_id for p in prompts], pa.string()),
        "text": pa.array([p.text for p in prompts], pa.string()),
        "token_ids": _ragged([p.token_ids for p in prompts]),
        "token_strings": pa.array([p.token_strings for p in prompts], pa.list_(pa.string())),
        "num_tokens": pa.array([p.num_tokens for p in prompts], pa.int32()),
        "plan_reason": pa.array([p.reason for p in prompts], pa.string()),
    }
    names = dict.fromkeys(name for prompt in prompts for name in prompt.metadata)
    for name in names:
        values = [p.metadata.get(name) for p in prompts]
        columns[stored_name(name)] = _metadata_column(values)
    fields = [PROMPT_FIELDS.field(name) for name in PROMPT_FIELDS.names]
    fields += [pa.field(name, columns[name].type) for name in list(columns)[len(fields) :]]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


def stored_name(name: str) -> str:
    """Return the column that a metadata field is stored as: its name, one `_` longer if taken.

    Also where it is a taken name with some `_` behind it: so no two fields share a column, and one
    field has the same column in every file and segment, whatever other fields stand beside it.
    """
    return f"{name}_" if name.rstrip("_") in RESERVED_COLUMNS else name


def unit_table(units: Sequence[PlannedUnit]) -> pa.Table:
    """Return units as the plan stores them."""
    rows = np.array(
        [(u.unit, u.first_prompt, u.num_prompts, u.num_tokens) for u in units], dtype=np.int64
    ).reshape(-1, 4)
    return pa.Table.from_arrays([pa.array(column) for column in rows.T], schema=UNIT_FIELDS)


def read_unit_table(objects: ObjectStore, segments: Sequence[PlanManifest]) -> UnitTable:
    """Return all units of a run as columns."""
    tables = [read_units(objects, manifest) for manifest in segments]
    whole = pa.concat_tables(tables)
    counts = [table.num_rows for table in tables]
    segment = np.repeat([manifest.segment for manifest in segments], counts)
    columns = [whole[name].to_numpy() for name in ("first_prompt", "num_prompts", "num_tokens")]
    return UnitTable(segment, *columns)


def _files(prompts: Iterator[Prompt]) -> Iterator[list[Prompt]]:
    """Cut the stream where a plan file is full."""
    batch: list[Prompt] = []
    tokens = 0
    for prompt in prompts:
        batch.append(prompt)
        tokens += prompt.num_tokens
        if tokens >= TOKENS_PER_FILE or len(batch) >= PROMPTS_PER_FILE:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _ids_before(objects: ObjectStore, before: Sequence[PlanManifest]) -> Iterator[str]:
    for manifest in before:
        for place in range(len(manifest.prompts)):
            table = read_prompt_file(objects, manifest, place, ["prompt_id"])
            yield from table["prompt_id"].to_pylist()


def refuse_repeated(ids: PromptIds, config: RunConfig, prompter: Prompter, first: int) -> None:
    """Raise `SourceError` where ids are used twice, naming them; reads the source once more then.

    `first` is the run-wide number of the source's first prompt.
    """
    repeated = ids.repeated()
    if not repeated:
        return
    wanted = {again: earlier for earlier, again in repeated}
    named = [
        f"{prompt.prompt_id!r} (prompts {wanted[place]} and {place})"
        for place, prompt in enumerate(
            prompter.prompts(PromptSource(config.prompts).records(), first), start=first
        )
        if place in wanted
    ]
    raise SourceError(
        f"prompt ids must be unique, and {config.prompts.source!r} repeats {', '.join(named)}; "
        "give each prompt its own id, or set prompts.id_column to null to have ids derived"
    )


def _ragged(rows: Sequence[np.ndarray]) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate(rows) if rows else np.empty(0, np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values, pa.int32()))


def _metadata_column(values: Sequence[Any]) -> pa.Array:
    """A column of one plain type where all values have one exactly; else each as JSON text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {bool} or kinds <= {str}:
        return pa.array(values, pa.bool_() if kinds == {bool} else pa.string())
    if kinds <= {int} and all(v is None or -(1 << 63) <= v < 1 << 63 for v in values):
        return pa.array(values, pa.int64())
    if float in kinds <= {int, float} and all(map(_is_float, values)):
        return pa.array([None if v is None else float(v) for v in values], pa.float64())
    texts = [v if v is None or isinstance(v, str) else json.dumps(v, default=str) for v in values]
    return pa.array(texts, pa.string())


def _is_float(value: Any) -> bool:
    """Whether a number stays the same as a float; integers beyond 2^53 may not."""
    if not isinstance(value, int):
        return True
    try:
        return float(value) == value
    except OverflowError:
        return False
