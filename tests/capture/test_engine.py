"""What a real engine stored is what the model computed: every layer, head and row.

Legend: L layers, H heads, T tokens, D head size.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.capture.comparison import (
    assert_close,
    assert_matches_reference,
    assert_stored_patterns,
    mixed_values,
    stored_sites,
)
from tests.capture.conftest import SMOLLM2_REFUSED
from tests.capture.live_capture import Captured

pytestmark = pytest.mark.engine

NOISE = 2e-4


def stored_prompts(captured: Captured) -> list[str]:
    table = captured.run.prompts
    status = table["status"].to_pylist()
    return [
        name
        for name, state in zip(table["prompt_id"].to_pylist(), status, strict=True)
        if state == "stored"
    ]


def assert_committed(captured: Captured) -> None:
    assert [result["error"] for result in captured.results] == [None] * len(captured.wanted.units)
    assert {result["status"] for result in captured.results} == {"committed"}


def assert_all_match(captured: Captured, reference) -> None:
    assert_committed(captured)
    run = captured.run
    for prompt in stored_prompts(captured):
        ids = captured.wanted.ids(int(prompt[1:]))
        assert run.tokens(prompt).ids.tolist() == ids
        assert_matches_reference(run, prompt, reference.layers(ids))


def test_smollm2_stores_what_transformers_computes(smollm2_1, smollm2_reference) -> None:
    prompts = stored_prompts(smollm2_1)
    lengths = {len(smollm2_1.wanted.ids(int(prompt[1:]))) for prompt in prompts}
    assert len(prompts) == 12
    assert len(lengths) >= 6
    assert max(lengths) > smollm2_1.wanted.engine["max_num_batched_tokens"]
    assert_all_match(smollm2_1, smollm2_reference)


def test_prompts_that_cannot_run_fail_by_name_and_the_rest_is_stored(smollm2_1) -> None:
    table = smollm2_1.run.prompts
    reasons = dict(enumerate(table["reason"].to_pylist()))
    failed = {n for n, state in enumerate(table["status"].to_pylist()) if state == "failed"}
    assert failed == set(SMOLLM2_REFUSED)
    for prompt, text in SMOLLM2_REFUSED.items():
        assert text in reasons[prompt]


def test_the_same_text_is_stored_once_for_each_of_its_ids(smollm2_1) -> None:
    ids = [smollm2_1.wanted.ids(prompt) for prompt in (1, 4, 12)]
    assert ids[0] == ids[1] == ids[2]
    first, again, elsewhere = (stored_sites(smollm2_1.run, p) for p in ("p1", "p4", "p12"))
    for site, values in first.items():
        assert_close(site, again[site], values, NOISE)
        assert_close(site, elsewhere[site], values, NOISE)


def test_three_ranks_store_the_same_as_one(smollm2_1, smollm2_3) -> None:
    assert_committed(smollm2_3)
    one, three = smollm2_1.run, smollm2_3.run
    assert stored_prompts(smollm2_1) == stored_prompts(smollm2_3)
    for prompt in stored_prompts(smollm2_1):
        alone, split = stored_sites(one, prompt), stored_sites(three, prompt)
        assert split["z"].shape[1] == 9
        assert split["rot_k"].shape[1] == 3
        for site, values in alone.items():
            assert_close(f"{site} of {prompt}", split[site], values, NOISE)


def test_z_is_the_pattern_times_v_in_stored_data_alone(smollm2_1, smollm2_3, tiny_qwen3_4) -> None:
    for captured in (smollm2_1, smollm2_3, tiny_qwen3_4):
        for prompt in stored_prompts(captured):
            mixed, z = mixed_values(captured.run, prompt)
            assert_close(f"z of {prompt}", mixed, z, 1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_qwen3_stores_what_transformers_computes(ranks, request, tiny_qwen3_reference) -> None:
    captured = request.getfixturevalue(f"tiny_qwen3_{ranks}")
    assert_all_match(captured["plain"] if ranks == 1 else captured, tiny_qwen3_reference)


def test_a_kv_head_that_two_ranks_hold_is_written_by_one(tiny_qwen3_4) -> None:
    commit = tiny_qwen3_4.run._index.commit(0)
    assert [rank.heads["rot_k"] for rank in commit.ranks] == [[0], [], [1], []]
    assert [rank.heads["rot_q"] for rank in commit.ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_patterns_stored_by_every_rank_are_the_rebuilt_ones(tiny_qwen3_4) -> None:
    for prompt in stored_prompts(tiny_qwen3_4):
        assert_stored_patterns(tiny_qwen3_4.run, prompt, 1e-6)
    commit = tiny_qwen3_4.run._index.commit(0)
    assert [rank.heads["pattern"] for rank in commit.ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_preempted_prompts_are_stored_exactly(tiny_qwen3_1, tiny_qwen3_reference) -> None:
    captured = tiny_qwen3_1["preempted"]
    assert_committed(captured)
    due = sum(len(ids) for unit in captured.wanted.units for ids in unit)
    assert captured.staged_rows[0] > due, "nothing was computed twice: no prompt was preempted"
    assert_all_match(captured, tiny_qwen3_reference)


def test_only_the_selected_sites_layers_and_positions_are_stored(
    tiny_qwen3_1, tiny_qwen3_reference
) -> None:
    captured = tiny_qwen3_1["ends"]
    assert_committed(captured)
    run = captured.run
    assert [str(site) for site in run.sites] == ["z"]
    assert list(run.layers) == [0, 2]
    kept = sum(min(3, len(ids)) for unit in captured.wanted.units for ids in unit)
    assert captured.staged_rows == [kept], "rows that are not kept are not even copied"
    for number, prompt in enumerate(stored_prompts(captured)):
        ids = captured.wanted.ids(number)
        layers = tiny_qwen3_reference.layers(ids)
        read = run.read("z", prompt=prompt)
        assert read.coords["pos"].values.tolist() == list(range(len(ids)))[-3:]
        for place, layer in enumerate((0, 2)):
            want_HTD = layers[layer].z_HTD[:, -3:]
            assert np.abs(read.values[place] - want_HTD).max() < 1e-3 * np.abs(want_HTD).max()


def test_bfloat16_bits_are_the_tensors_own(tiny_qwen3_1) -> None:
    captured = tiny_qwen3_1["bfloat16"]
    assert_committed(captured)
    for prompt in stored_prompts(captured):
        unit = int(prompt[1:])
        seen = captured.bits(unit)
        for site in ("rot_q", "rot_k", "v", "z"):
            stored_LHTD = captured.run.read(site, prompt=prompt).values
            assert stored_LHTD.dtype.name == "bfloat16"
            for layer, rows_HTD in enumerate(stored_LHTD):
                rows_TF = rows_HTD.transpose(1, 0, 2).reshape(rows_HTD.shape[1], -1)
                bits = np.ascontiguousarray(rows_TF).view(np.uint8)
                assert np.array_equal(bits, seen[f"{layer}/{site}"]), (prompt, site, layer)


def test_bfloat16_rows_hold_together(tiny_qwen3_1) -> None:
    captured = tiny_qwen3_1["bfloat16"]
    for prompt in stored_prompts(captured):
        mixed, z = mixed_values(captured.run, prompt)
        assert_close(f"z of {prompt}", mixed, z, 1.6e-2)


def test_contributions_of_all_heads_sum_to_the_blocks_output(
    smollm2_1, smollm2_3, smollm2_reference, tiny_qwen3_1, tiny_qwen3_2, tiny_qwen3_reference
) -> None:
    for captured, reference in (
        (smollm2_1, smollm2_reference),
        (smollm2_3, smollm2_reference),
        (tiny_qwen3_1["plain"], tiny_qwen3_reference),
        (tiny_qwen3_2, tiny_qwen3_reference),
    ):
        run = captured.run
        reference.layers(captured.wanted.ids(0))
        for layer in run.layers:
            output_TM = reference.block_outputs[layer]
            by_head = run.contribution("p0", layer)
            np.testing.assert_allclose(
                by_head.sum("head"), output_TM, atol=1e-3 * np.abs(output_TM).max()
            )
            alone = run.contribution("p0", layer, head=1, pos=-1)
            wanted = by_head.sel(head=1).isel(pos=-1)
            np.testing.assert_allclose(alone, wanted, atol=1e-5 * np.abs(wanted).max())


def test_pre_q_and_pre_k_are_what_the_projection_gave(tiny_qwen3_1, tiny_qwen3_2) -> None:
    for captured in (tiny_qwen3_1["plain"], tiny_qwen3_2):
        for name in ("q", "k"):
            before = captured.run.read(f"pre_{name}", prompt="p2")
            after = captured.run.read(f"rot_{name}", prompt="p2")
            assert before.dims == after.dims
            assert np.abs(before.values - after.values).max() > 0.1
