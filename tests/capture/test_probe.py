"""A user's probe runs on the ranks, and its tensors are sites of the run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from capture.attention_layers import LocalLayer
from capture.errors import ProbeError
from capture.probe import Probe, check_names
from capture.probe_source import probe_source
from capture.rows import Span
from tests.capture import sample_probe
from tests.capture.live_capture import Captured

LAYER = LocalLayer(0, "attn", 4, 2, 8, 8, 1.0, None, None, None, None)


def make(name: str) -> Probe:
    path = f"tests.capture.sample_probe:{name}"
    return Probe(path, LAYER, torch.float32, torch.device("cpu"))


@pytest.mark.engine
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_probe_returns_is_read_like_any_site(ranks: int, request) -> None:
    captured: Captured = request.getfixturevalue(f"tiny_probed_{ranks}")
    assert {result["error"] for result in captured.results} == {None}
    run = captured.run
    probed = {"z_norm", "z_plus_layer", "last_row_entropy"}
    assert set(run.sites) == {"rot_q", "rot_k", "z", *probed}
    for prompt in run.prompts["prompt_id"].to_pylist():
        z = run.read("z", prompt=prompt)
        norm, plus = run.read("z_norm", prompt=prompt), run.read("z_plus_layer", prompt=prompt)
        assert norm.dims == z.dims
        assert norm.dtype == np.float32
        assert plus.dtype == np.float16
        want = np.linalg.norm(z.values, axis=-1, keepdims=True)
        np.testing.assert_allclose(norm.values, want, rtol=1e-5)
        added = z.values + np.asarray(run.layers)[:, None, None, None]
        np.testing.assert_allclose(plus.values, added, rtol=2e-3, atol=2e-3)


@pytest.mark.engine
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_entropy_of_the_example_is_that_of_the_pattern(ranks: int, request) -> None:
    run = request.getfixturevalue(f"tiny_probed_{ranks}").run
    seen: dict[str, list[int]] = {}
    for prompt in run.prompts["prompt_id"].to_pylist():
        entropy_LNQ = run.read("last_row_entropy", prompt=prompt).values[..., 0]
        pattern_LNQK = run.pattern(prompt).values.astype(np.float64)
        logs = np.log(pattern_LNQK, where=pattern_LNQK > 0, out=np.zeros_like(pattern_LNQK))
        want_LNQ = -(pattern_LNQK * logs).sum(-1)
        there_LNQ = ~np.isnan(entropy_LNQ)
        assert (there_LNQ == there_LNQ[:1, :1]).all(), "rows of every layer and head alike"
        seen[prompt] = np.flatnonzero(there_LNQ[0, 0]).tolist()
        np.testing.assert_allclose(entropy_LNQ[there_LNQ], want_LNQ[there_LNQ], atol=1e-4)
        assert len(seen[prompt]) == 1
    # The first prompts fit the first step whole; of the third its first step's last row is known.
    assert [seen["p0"], seen["p1"]] == [[32], [0]]
    assert seen["p2"] != [199]


@pytest.mark.engine
def test_a_probe_that_raises_fails_its_units_with_its_traceback(tiny_qwen3_1) -> None:
    results = tiny_qwen3_1["failing probe"].results
    assert {result["status"] for result in results} == {"failed"}
    assert all("StoreError: this probe dislikes layer 1" in r["error"] for r in results)
    assert not any(result["store_failed"] for result in results), "it is charged, not repeated"
    assert all("sample_probe.py" in result["error"] for result in results)


def test_a_probe_that_cannot_be_used_is_refused_at_the_start() -> None:
    with pytest.raises(ProbeError, match="not \\[rows, local heads\\]"):
        make("wrong_rows")
    with pytest.raises(ProbeError, match="cannot be imported"):
        make("no_such_probe")


def test_a_worker_with_another_source_than_the_run_was_made_with_is_refused() -> None:
    path, device = "tests.capture.sample_probe:norms", torch.device("cpu")
    Probe(path, LAYER, torch.float32, device, probe_source(path))
    with pytest.raises(ProbeError, match=f"{probe_source(path)}.*{'0' * 64}"):
        Probe(path, LAYER, torch.float32, device, "0" * 64)


def test_a_probe_that_changes_its_answer_is_an_error() -> None:
    probe = make("norms")
    rows = [torch.zeros(5, heads, 8) for heads in (4, 2, 2, 4)]
    spans = [Span(None, 0, 0, 5)]
    assert [tuple(x.shape) for x in probe(0, rows, spans)] == [(5, 4, 1), (5, 4, 1), (5, 4, 8)]
    probe._function = sample_probe.fails
    with pytest.raises(ProbeError, match="z_norm at layer 0"):
        probe(0, rows, spans)


def test_a_probe_that_writes_into_what_it_is_given_changes_no_row_of_the_model() -> None:
    probe = make("scribbles")
    rows = [torch.ones(5, heads, 8) for heads in (4, 2, 2, 4)]
    (norm,) = probe(0, rows, [Span(None, 0, 0, 5)])
    assert all(bool((tensor == 1).all()) for tensor in rows)
    torch.testing.assert_close(norm, torch.full((5, 4, 1), 8**0.5))


@pytest.mark.parametrize("heads", [2, 3, 4, 5])
def test_heads_before_rows_are_refused_at_the_start_however_many_there_are(heads: int) -> None:
    layer = LocalLayer(0, "attn", heads, heads, 8, 8, 1.0, None, None, None, None)
    path = "tests.capture.sample_probe:heads_first"
    with pytest.raises(ProbeError, match="not \\[rows, local heads\\]"):
        Probe(path, layer, torch.float32, torch.device("cpu"))


def test_heads_before_rows_are_refused_in_a_step_too() -> None:
    layer = LocalLayer(0, "attn", 4, 4, 8, 8, 1.0, None, None, None, None)
    probe = Probe("tests.capture.sample_probe:scribbles", layer, torch.float32, torch.device("cpu"))
    probe._function = sample_probe.heads_first
    with pytest.raises(ProbeError, match="z_norm at layer 0"):
        probe(0, [torch.ones(6, 4, 8) for _ in range(4)], [Span(None, 0, 0, 6)])


@pytest.mark.parametrize("name", ["scores", "token_ids", "file", "prompt", "q", "z", "hook_mine"])
def test_a_name_that_means_something_else_is_refused_by_name(name: str) -> None:
    sample_probe.NAME = name
    with pytest.raises(ProbeError, match=f"'{name}' cannot be a site's name"):
        make("named")
    with pytest.raises(ProbeError, match=f"'{name}' cannot be a site's name"):
        check_names("tests.capture.sample_probe:named", (4, 2, 8, 8))


def test_a_trial_for_names_leaves_other_faults_to_the_ranks() -> None:
    for probe in ("no_cpu", "wrong_rows", "norms"):
        check_names(f"tests.capture.sample_probe:{probe}", (4, 2, 8, 8))


def test_whatever_a_probe_makes_of_views_comes_out_as_plain_rows() -> None:
    probe = make("views")
    rows = [torch.randn(6, heads, 8) for heads in (4, 2, 2, 4)]
    found = dict(
        zip([site.name for site in probe.sites], probe(0, rows, [Span(None, 0, 0, 6)]), strict=True)
    )
    assert all(x.is_contiguous() and not x.requires_grad and not x.is_neg() for x in found.values())
    z = rows[3]
    torch.testing.assert_close(found["expanded"], z[:, :1, :1].expand(6, 4, 4))
    torch.testing.assert_close(found["turned"], z)
    torch.testing.assert_close(found["negated"], -z)
    torch.testing.assert_close(found["learnt"], z * 2)


@pytest.mark.parametrize("probe", ["sparse", "elsewhere"])
def test_tensors_that_cannot_be_staged_are_refused_at_the_start(probe: str) -> None:
    with pytest.raises(ProbeError, match=f"{probe} lies on|{probe} is a torch.sparse"):
        make(probe)
