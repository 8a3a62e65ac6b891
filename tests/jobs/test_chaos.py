"""Strikes at a real run that take minutes: a run taken over, a poison prompt, Ray itself killed.

Real engine, real Ray, real store; each ends with every prompt stored once and every byte verified.
`test_strikes.py` has those that the default suite runs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from jobs.listing import prompt_rows
from store.objects.open import open_store
from tests.jobs.poison_main import POISON_TOKENS
from tests.jobs.run_process import SLOW, RunProcess, assert_complete, texts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

Configs = Callable[..., Path]


@pytest.mark.chaos
def test_a_second_driver_is_told_and_one_that_takes_over_wins(
    engine_config: Configs, tmp_path: Path
) -> None:
    config = engine_config(texts(2000), engine=SLOW)
    with RunProcess(config) as first:
        first.wait_for("committed", 1)
        with RunProcess(config) as second:
            assert second.finish() == 75, second.transcript()
            assert any("works on this run" in line for line in second.other)
        with RunProcess(config, "--take-over") as third:
            codes = {first.finish(), third.finish()}
        assert codes <= {0, 75}, first.transcript() + third.transcript()
    with RunProcess(config) as last:
        assert last.finish() == 0, last.transcript()
    assert_complete(tmp_path / "run")


@pytest.mark.chaos
def test_a_poison_prompt_is_the_only_one_lost(engine_config: Configs, tmp_path: Path) -> None:
    records = [{"id": f"p{i}", "text": text} for i, text in enumerate(texts(40))]
    records[17]["text"] = "poison " * 20
    config = engine_config(records, workers={"max_attempts": 2})
    length = _tokens_of(config, "p17")
    main = ("-m", "tests.jobs.poison_main")
    with RunProcess(config, main=main, **{POISON_TOKENS: str(length)}) as run:
        assert run.finish() == 3, run.transcript()
    assert_complete(tmp_path / "run", failed=["p17"])
    row = next(r for r in prompt_rows(open_store(str(tmp_path / "run"))) if r.prompt_id == "p17")
    assert row.reason is not None
    assert row.reason.startswith("quarantined: it failed 2 times running alone")


def _tokens_of(config: Path, prompt_id: str) -> int:
    """How many tokens a prompt has; no other may have as many."""
    from jobs.config_file import load_config
    from jobs.plan import make_prompter
    from jobs.sources import PromptSource

    settings = load_config(config)
    prompts = list(make_prompter(settings).prompts(PromptSource(settings.prompts).records()))
    lengths = {prompt.prompt_id: prompt.num_tokens for prompt in prompts}
    assert sum(1 for length in lengths.values() if length == lengths[prompt_id]) == 1
    return lengths[prompt_id]


@pytest.mark.chaos
def test_a_killed_raylet_of_a_lone_machine_ends_with_75_and_running_again_goes_on(
    engine_config: Configs, tmp_path: Path
) -> None:
    # Workers outlive their raylet by some seconds: the run must not be over by then.
    config = engine_config(texts(6000), engine=SLOW)
    with RunProcess(config) as run:
        run.wait_for("committed", 2)
        driver = psutil.Process(run.process.pid)
        raylet = next(c for c in driver.children(recursive=True) if c.name() == "raylet")
        os.kill(raylet.pid, signal.SIGKILL)
        assert run.finish() == 75, run.transcript()
        assert run.named("worker lost: node lost")
    with RunProcess(config) as again:
        assert again.finish() == 0, again.transcript()
    assert_complete(tmp_path / "run")
