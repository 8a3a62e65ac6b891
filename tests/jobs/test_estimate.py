"""A dry run before and after planning says the same, whatever is kept of each prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.rows import UnitLayout
from jobs.config import PatternMode, RunConfig
from jobs.dry_run import check_quota, preview
from jobs.errors import QuotaExceeded
from jobs.estimate import Rates
from jobs.model_identity import attention_shape
from jobs.prepare import create_run
from jobs.stored_rows import StoredRows
from store.objects.open import open_store

Configs = Callable[..., RunConfig]
Prompts = Callable[..., Path]
LENGTHS = (3, 1, 9, 4, 4, 7, 2, 30, 63, 5)
TEXTS = [" ".join(["w7"] * length) for length in (*LENGTHS, 80)] + [""]


@pytest.mark.parametrize("positions", ["last", "2:6", "-3:", "-5:-2", "1:", ":-1", "all"])
def test_selected_positions_alone_are_counted(
    make_config: Configs, write_prompts: Prompts, positions: str
) -> None:
    capture = {"positions": positions, "sites": ["z", "v"], "layers": [0], "unit_tokens": 16}
    config = make_config(write_prompts(TEXTS), capture=capture)
    before = preview(config, Rates(tokens_per_second=1.0))
    kept = config.capture.kept_positions()
    assert before.rows == sum(kept.of(length)[1] for length in LENGTHS)
    assert before.tokens == sum(LENGTHS)
    assert before.hours == pytest.approx(sum(LENGTHS) / 3600)
    assert (before.prompts, before.unusable) == (12, 2)
    create_run(open_store(config.output), config)
    after = preview(config, Rates(tokens_per_second=1.0))
    for name in ("tokens", "rows", "units", "site_bytes", "objects", "hours", "upper_bound"):
        assert getattr(after, name) == getattr(before, name), name


def test_stored_patterns_are_counted_prompt_by_prompt(
    make_config: Configs, write_prompts: Prompts
) -> None:
    capture = {"pattern": "stored", "pattern_dtype": "uint8", "layers": [0], "unit_tokens": 16}
    config = make_config(write_prompts(TEXTS), capture=capture)
    before = preview(config, Rates())
    run = create_run(open_store(config.output), config)
    after = preview(config, Rates())
    assert (after.site_bytes, after.objects) == (before.site_bytes, before.objects)
    heads = attention_shape(config.model).heads
    least = heads * sum(length * (length + 1) // 2 for length in LENGTHS)
    assert before.site_bytes["pattern"] >= least
    derived = config.model_copy(
        update={"capture": config.capture.model_copy(update={"pattern": PatternMode.DERIVED})}
    )
    without = preview(derived.model_copy(update={"output": f"{config.output}-2"}), Rates())
    assert before.raw_bytes - before.site_bytes["pattern"] == without.raw_bytes
    objects = open_store(config.output)
    check_quota(objects, config.model_copy(update={"max_bytes": before.stored_bytes}), run)
    with pytest.raises(QuotaExceeded):
        check_quota(objects, config.model_copy(update={"max_bytes": before.stored_bytes - 1}), run)


def test_a_quota_counts_what_is_kept(make_config: Configs, write_prompts: Prompts) -> None:
    """Units of long and of short prompts: the quickly told most is above what is kept."""
    texts = [" ".join(["w7"] * length) for length in (60, 1, 1, 1, 1, 1) * 40]
    capture = {"positions": "3:7", "sites": ["z"], "unit_tokens": 600}
    config = make_config(write_prompts(texts), capture=capture)
    run = create_run(open_store(config.output), config)
    exact = preview(config, Rates()).stored_bytes
    objects = open_store(config.output)
    check_quota(objects, config.model_copy(update={"max_bytes": exact}), run)
    with pytest.raises(QuotaExceeded):
        check_quota(objects, config.model_copy(update={"max_bytes": exact - 1}), run)


def test_a_continued_prompt_counts_up_to_the_longest_sequence(
    make_config: Configs, write_prompts: Prompts
) -> None:
    config = make_config(write_prompts(TEXTS), generate={"tokens": 10})
    found = preview(config, Rates())
    assert found.upper_bound
    assert found.rows == found.tokens == sum(min(length + 10, 64) - 1 for length in LENGTHS)
    assert found.cut_short == 1


@pytest.mark.parametrize(("tokens", "short"), [(0, 0), (1, 0), (34, 1), (35, 2), (600, 10)])
def test_prompts_without_room_for_all_generated_tokens_are_counted(
    make_config: Configs, write_prompts: Prompts, tokens: int, short: int
) -> None:
    config = make_config(write_prompts(TEXTS), generate={"tokens": tokens})
    assert preview(config, Rates()).cut_short == short
    create_run(open_store(config.output), config)
    planned = preview(config, Rates())
    assert (planned.cut_short, planned.as_json()["prompts_cut_short"]) == (short, short)


@given(
    st.lists(st.lists(st.integers(0, 70), max_size=6), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(-9, 9)),
    st.one_of(st.none(), st.integers(-9, 9)),
)
def test_rows_are_those_of_the_engines_layout(
    units: list[list[int]], start: int | None, stop: int | None
) -> None:
    edges = ("" if edge is None else edge for edge in (start, stop))
    body = {"output": "o", "prompts": {"source": "p"}, "model": {"path": "m"}}
    capture = {"positions": ":".join(map(str, edges)), "sites": ["z"]}
    config = RunConfig.model_validate({**body, "capture": capture})
    stored = StoredRows(config)
    for lengths in units:
        layout = UnitLayout.plan(0, 0, "a", lengths, config.capture.kept_positions())
        rows = stored.of_prompts(np.array(lengths, np.int64))
        assert rows.tolist() == layout.num_rows.tolist()
        total, count = np.array([sum(lengths)]), np.array([len(lengths)])
        assert stored.of_units(total, count)[0] >= rows.sum()
