"""Transformers as a witness of the self-check: what it shows, and why it may show nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from capture import reference
from capture.checkpoints.tiny import tiny
from capture.reference import reference_patterns

IDS = np.arange(3, 9, dtype=np.int32)


def test_the_patterns_are_those_of_the_layers_asked_for(tiny_qwen3_dir) -> None:
    shown = reference_patterns(str(tiny_qwen3_dir), IDS, [0, 2])
    assert shown.why_not == ""
    assert sorted(shown.by_layer) == [0, 2]
    for pattern_HQK in shown.by_layer.values():
        assert pattern_HQK.shape == (8, 6, 6)
        np.testing.assert_allclose(pattern_HQK.sum(-1), 1, rtol=1e-5)
        assert not np.triu(pattern_HQK, 1).any()
    assert np.abs(shown.by_layer[0] - shown.by_layer[2]).max() > 0.01


def test_a_checkpoint_that_transformers_cannot_show_says_why(tmp_path) -> None:
    assert "not a local folder" in reference_patterns("some/hub-name", IDS, [0]).why_not
    assert "0 bytes" in reference_patterns(str(tmp_path), IDS, [0]).why_not
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    assert "does not run it" in reference_patterns(str(tmp_path), IDS, [0]).why_not


class Witness:
    """A model of four layers as transformers gives it, that shows some patterns or stumbles."""

    def __init__(self, shown: object, **text: object) -> None:
        self.shown = shown
        plain = SimpleNamespace(to_dict=lambda: {"num_hidden_layers": 4, **text})
        self.config = SimpleNamespace(get_text_config=lambda: plain)

    def __call__(self, *_: object, **__: object) -> SimpleNamespace:
        if isinstance(self.shown, Exception):
            raise self.shown
        return SimpleNamespace(attentions=self.shown)


ONE = torch.ones(1, 2, 6, 6)


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (AttributeError("no such kernel"), "does not run it: AttributeError: no such kernel"),
        (RuntimeError("x" * 900), "does not run it: RuntimeError: xxx"),
        (None, "shows no patterns"),
        ((ONE, None, ONE, ONE), "shows no patterns"),
        ((ONE, ONE), "shows no patterns"),
    ],
    ids=["an odd error", "a long one", "none", "none of a layer", "only of attention layers"],
)
def test_a_witness_without_a_pattern_of_every_layer_is_none(
    tmp_path, monkeypatch: pytest.MonkeyPatch, shown: object, why: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(reference, "_load", lambda _folder: Witness(shown))
    found = reference_patterns(str(tmp_path), IDS, [0, 1])
    assert found.by_layer == {}
    assert why in found.why_not
    assert len(found.why_not) < 400


def test_of_a_mixed_model_the_attention_layers_may_be_all_that_is_shown(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    kinds = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
    for shown in ((ONE, 3 * ONE), (None, ONE, None, 3 * ONE)):
        witness = Witness(shown, **kinds)
        monkeypatch.setattr(reference, "_load", lambda _folder, one=witness: one)
        found = reference_patterns(str(tmp_path), IDS, [3]).by_layer
        assert list(found) == [3]
        assert (found[3] == 3).all()
        assert "shows no patterns" in reference_patterns(str(tmp_path), IDS, [2, 3]).why_not


def test_the_patterns_of_a_real_mixed_model_are_found(tmp_path) -> None:
    model = tiny("granitemoehybrid", tmp_path / "model")
    shown = reference_patterns(str(model), IDS, [1, 3])
    assert shown.why_not == ""
    assert [shown.by_layer[n].shape for n in (1, 3)] == [(4, 6, 6)] * 2
    assert np.abs(shown.by_layer[1] - shown.by_layer[3]).max() > 0.01
