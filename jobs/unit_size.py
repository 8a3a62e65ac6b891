"""How large units are where the config leaves it open: large enough, and four fit the buffers.

Units in flight overlap only while all that they take fits `engine.buffer_bytes` together. The size
is worked out once, when a run is created, from the model's own config and the run's; the run then
keeps it (`UNIT_SIZE` among its frozen fields), whatever the buffers are later. Tokens tell what a
unit takes, except where patterns are stored (they grow with the square of each prompt) or prompts
continued: there the bytes of every prompt are counted too. Pure, besides reading a model config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jobs.config import PatternMode, RunConfig
from jobs.errors import ConfigError
from jobs.estimate import rank_entry_bytes, rank_row_bytes
from jobs.model_identity import attention_shape
from jobs.packing import UnitPacker
from jobs.stored_rows import StoredRows
from store.byte_count import human_bytes
from store.geometry import CHUNK_TOKENS
from store.packed_pattern import num_entries

UNIT_TOKENS, UNIT_BYTES = "capture.unit_tokens", "capture.unit_bytes"
UNIT_SIZE = (UNIT_TOKENS, UNIT_BYTES)
"""The frozen fields that a run keeps where a config leaves them open."""

MOST_TOKENS = 65_536
UNKNOWN_TOKENS = 16_384
"""Where the model's config does not say what a token takes."""
UNITS_THAT_FIT = 4


def with_unit_size(config: RunConfig, kept: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the config with `capture.unit_tokens` set, and `unit_bytes` where bytes count.

    Each is as given, else as in `kept` (the frozen fields of a run that is there), else chosen.
    Raises `ConfigError` where the size is the config's own and one unit's rows exceed
    `engine.buffer_bytes`.
    """
    tokens, most_bytes = config.capture.unit_tokens, config.capture.unit_bytes
    if tokens is not None:
        _check_one_fits(config, tokens)
    if kept is not None:
        tokens = kept.get(UNIT_TOKENS) if tokens is None else tokens
        most_bytes = kept.get(UNIT_BYTES) if most_bytes is None else most_bytes
    elif tokens is None and most_bytes is None:
        most_bytes = chosen_unit_bytes(config)
    if tokens is None:
        tokens = chosen_unit_tokens(config)
    size = {"unit_tokens": tokens, "unit_bytes": most_bytes}
    return config.model_copy(update={"capture": config.capture.model_copy(update=size)})


def chosen_unit_tokens(config: RunConfig) -> int:
    """Return the tokens of a unit for a new run: whole chunks of them, 65,536 at most."""
    row_bytes = _row_bytes(config)
    if row_bytes is None:
        return UNKNOWN_TOKENS
    fitting = config.engine.buffer_bytes // (UNITS_THAT_FIT * row_bytes)
    return max(CHUNK_TOKENS, min(MOST_TOKENS, fitting // CHUNK_TOKENS * CHUNK_TOKENS))


def chosen_unit_bytes(config: RunConfig) -> int | None:
    """Return the bytes of a unit for a new run; None where its tokens tell, or nothing does."""
    more = config.capture.pattern is PatternMode.STORED or config.generate.tokens > 0
    if not more or _row_bytes(config) is None:
        return None
    return config.engine.buffer_bytes // UNITS_THAT_FIT


def unit_packer(config: RunConfig, first_unit: int = 0, first_prompt: int = 0) -> UnitPacker:
    """Return what cuts prompts into units of this config's size, which is set."""
    capture = config.capture
    assert capture.unit_tokens is not None, "with_unit_size sets it before anything is planned"
    if capture.unit_bytes is None:
        return UnitPacker(capture.unit_tokens, first_unit, first_prompt)
    return UnitPacker(
        capture.unit_tokens,
        first_unit,
        first_prompt,
        unit_bytes=capture.unit_bytes,
        bytes_of=prompt_bytes(config),
    )


def prompt_bytes(config: RunConfig) -> Callable[[int], int]:
    """Return what says how many bytes a prompt of so many tokens takes on the fullest rank.

    Exact, as the engine counts it before a unit begins: rows, those kept until a pattern is made,
    and packed patterns; where prompts are continued the most there can be. A probe's rows are known
    to the engine alone. Raises `ConfigError` where the model's config does not tell.
    """
    shape = attention_shape(config.model)
    of_row, of_entry = rank_row_bytes(config, shape), rank_entry_bytes(config, shape)
    stored = StoredRows(config)

    def size(num_tokens: int) -> int:
        rows = stored.of_prompt(num_tokens)
        return rows * of_row + num_entries(rows) * of_entry

    return size


def _check_one_fits(config: RunConfig, tokens: int) -> None:
    row_bytes = _row_bytes(config)
    budget = config.engine.buffer_bytes
    if row_bytes is not None and tokens * row_bytes > budget:
        raise ConfigError(
            f"capture.unit_tokens is {tokens}: a unit's rows take {human_bytes(tokens * row_bytes)}"
            f" on each rank, more than engine.buffer_bytes ({human_bytes(budget)}). Set unit_tokens"
            f" to at most {budget // row_bytes}, or engine.buffer_bytes to {tokens * row_bytes}"
        )


def _row_bytes(config: RunConfig) -> int | None:
    try:
        return rank_row_bytes(config, attention_shape(config.model))
    except ConfigError:
        return None
