"""How many tokens a unit takes where the config leaves it open: enough, and four fit the buffers.

Units in flight overlap only while their rows fit `engine.buffer_bytes` together. The size is worked
out once, when a run is created, from the model's own config and the run's; the run then keeps it
(`capture.unit_tokens` among its frozen fields), whatever the buffers are later. Pure, besides
reading the model's config.
"""

from __future__ import annotations

from jobs.config import PatternMode, RunConfig
from jobs.errors import ConfigError
from jobs.estimate import rank_row_bytes
from jobs.model_identity import attention_shape
from store.byte_count import human_bytes
from store.geometry import CHUNK_TOKENS

MOST_TOKENS = 65_536
UNKNOWN_TOKENS = 16_384
"""Where the model's config does not say what a token takes, and at most where patterns are stored,
whose bytes go by the prompts' lengths."""
UNITS_THAT_FIT = 4


def with_unit_tokens(config: RunConfig, kept: int | None = None) -> RunConfig:
    """Return the config with `capture.unit_tokens` set: as given, else `kept`, else chosen.

    `kept` is what the run was created with. Raises `ConfigError` where the size is the config's own
    and one unit's rows exceed `engine.buffer_bytes`.
    """
    given = config.capture.unit_tokens
    if given is not None:
        _check_one_fits(config, given)
        return config
    tokens = kept if kept is not None else chosen_unit_tokens(config)
    capture = config.capture.model_copy(update={"unit_tokens": tokens})
    return config.model_copy(update={"capture": capture})


def chosen_unit_tokens(config: RunConfig) -> int:
    """Return the size for a new run: whole chunks of tokens, 65,536 at most."""
    row_bytes = _row_bytes(config)
    if row_bytes is None:
        return UNKNOWN_TOKENS
    stored = config.capture.pattern is PatternMode.STORED
    most = UNKNOWN_TOKENS if stored else MOST_TOKENS
    fitting = config.engine.buffer_bytes // (UNITS_THAT_FIT * row_bytes)
    return max(CHUNK_TOKENS, min(most, fitting // CHUNK_TOKENS * CHUNK_TOKENS))


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
