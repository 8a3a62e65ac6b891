"""Generated positions are rows like any other, and what was said is kept.

Legend: L layers, N heads, Q query rows, K key rows.
"""

from __future__ import annotations

import numpy as np
import pytest
from vllm import SamplingParams

from capture.adapters.vllm_engine import _sampling
from capture.settings import Generation
from store.verify import verify_run
from tests.capture.comparison import (
    assert_close,
    assert_matches_reference,
    assert_stored_patterns,
    stored_sites,
)
from tests.capture.conftest import GENERATED_TOKENS
from tests.capture.live_capture import Captured

pytestmark = pytest.mark.engine


def prompts_of(captured: Captured) -> list[str]:
    assert {result["error"] for result in captured.results} == {None}
    return captured.run.prompts["prompt_id"].to_pylist()


@pytest.mark.parametrize("name", ["greedy", "sampled", "long"])
def test_rows_are_those_of_one_prefill_of_the_whole_sequence(
    name: str, tiny_generated, tiny_qwen3_reference
) -> None:
    captured = tiny_generated[name]
    run = captured.run
    for prompt in prompts_of(captured):
        tokens = run.tokens(prompt)
        planned = captured.wanted.ids(int(prompt[1:]))
        assert tokens.ids[: len(planned)].tolist() == planned
        assert tokens.num_generated == len(tokens) - len(planned) > 0
        fed = tokens.ids[:-1]
        assert run.read("z", prompt=prompt).sizes["pos"] == len(fed)
        assert_matches_reference(run, prompt, tiny_qwen3_reference.layers(fed))


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_tokens_and_logprobs_are_the_models(
    name: str, tiny_generated, tiny_qwen3_reference
) -> None:
    """Log-probabilities are of the model itself: no temperature is in them."""
    import torch

    captured = tiny_generated[name]
    unlikely = 0
    for prompt in prompts_of(captured):
        tokens = captured.run.tokens(prompt)
        count = tokens.num_generated
        assert 0 < count == len(tokens.logprobs) <= GENERATED_TOKENS
        with torch.no_grad():
            logits = tiny_qwen3_reference.model(torch.tensor([tokens.ids.tolist()])).logits[0]
        logprobs = logits.log_softmax(-1)[-count - 1 : -1]
        chosen = tokens.ids[-count:]
        unlikely += int((logprobs.argmax(-1).numpy() != chosen).sum())
        assert name == "sampled" or (unlikely, count) == (0, GENERATED_TOKENS)
        expected = logprobs.gather(1, torch.tensor(chosen[:, None].tolist()))[:, 0]
        np.testing.assert_allclose(tokens.logprobs, expected.numpy(), atol=1e-4)
    assert name == "greedy" or unlikely > 0


def test_sampling_draws_the_same_whatever_is_batched_together(tiny_generated) -> None:
    batched, alone = tiny_generated["sampled"].run, tiny_generated["sampled alone"].run
    said = set()
    for prompt in prompts_of(tiny_generated["sampled"]):
        one, other = batched.tokens(prompt), alone.tokens(prompt)
        assert one.ids.tolist() == other.ids.tolist()
        said.add(tuple(one.ids[-one.num_generated :].tolist()))
        for site, values in stored_sites(batched, prompt).items():
            assert_close(f"{site} of {prompt}", stored_sites(alone, prompt)[site], values, 2e-4)
    assert len(said) > 1


def test_an_end_token_ends_a_prompt_and_its_unit_stays_whole(tiny_generated) -> None:
    captured = tiny_generated["long"]
    lengths = set()
    for prompt in prompts_of(captured):
        tokens = captured.run.tokens(prompt)
        lengths.add(tokens.num_generated)
        ended = int(tokens.ids[-1]) == 1
        cut = len(tokens) == captured.wanted.engine["max_model_len"]
        assert ended or cut or tokens.num_generated == 120
        assert 1 not in tokens.ids[-tokens.num_generated : -1].tolist()
    assert len(lengths) > 1, "every prompt went on to the end: nothing was cut"


def test_preemption_while_generating_computes_rows_again(tiny_generated) -> None:
    captured = tiny_generated["long"]
    rows = sum(captured.run.read("z", prompt=p).sizes["pos"] for p in prompts_of(captured))
    assert captured.staged_rows[0] > rows


def test_what_was_said_is_committed_and_verified(tiny_generated) -> None:
    captured = tiny_generated["sampled"]
    assert verify_run(captured.run._objects, deep=True).problems == []
    commit = captured.run._index.commit(0)
    assert "generated.parquet" in {record.name for record in commit.objects}
    positions = captured.run.read("z", prompt="p0")["pos"].values
    assert positions.tolist() == list(range(len(positions)))
    assert len(captured.run.read("z", prompt="p0")["token"].values) == len(positions)


def test_every_sampling_setting_reaches_vllm() -> None:
    chosen = Generation(max_tokens=9, temperature=0.7, top_p=0.9, top_k=5, seed=3, ignore_eos=True)
    one, other = (_sampling(chosen, number) for number in (4, 5))
    assert one.pop("seed") != other.pop("seed") >= 0
    params = SamplingParams(**one)
    for name in ("max_tokens", "temperature", "top_p", "top_k", "ignore_eos"):
        assert getattr(params, name) == getattr(chosen, name), name
    assert one == other
    assert SamplingParams(**_sampling(None, 4)).max_tokens == 1


@pytest.mark.parametrize("name", ["long", "two ranks"])
def test_stored_patterns_of_continued_prompts_are_the_rebuilt_ones(
    name: str, tiny_generated, request
) -> None:
    captured = tiny_generated["long"]
    if name == "two ranks":
        captured = request.getfixturevalue("tiny_qwen3_on_2")[1]
    for prompt in prompts_of(captured):
        assert_stored_patterns(captured.run, prompt, 2**-11)
    assert verify_run(captured.run._objects, deep=True).problems == []
