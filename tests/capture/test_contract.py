"""The installed nnsight and vLLM are what the adapters rely on, and a change would be named."""

from __future__ import annotations

import pytest

from capture.adapters.contract import PARTS, Part, check_contract, problem_of
from capture.errors import AdapterMismatch


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.path.partition(":")[2] or part.path)
def test_every_part_is_as_expected(part: Part) -> None:
    from vllm.platforms import current_platform

    if part.platform == "cpu" and not current_platform.is_cpu():
        return
    assert problem_of(part) is None, part


def test_the_contract_holds_as_a_whole() -> None:
    check_contract()


BROKEN = [
    (Part("nnsight.no_such_module:Mediator", "a block"), "it is gone"),
    (Part("nnsight.intervention.interleaver:Mediator.no_such", "a block"), "it is gone"),
    (Part("nnsight.intervention.interleaver:Mediator.start", "a", takes=("rows",)), "takes rows"),
    (
        Part("nnsight.intervention.interleaver:Mediator.__init__", "a", mentions=("no_such",)),
        "uses no_such",
    ),
]


@pytest.mark.parametrize(("part", "problem"), BROKEN, ids=[problem for _, problem in BROKEN])
def test_what_changed_is_named(part: Part, problem: str) -> None:
    with pytest.raises(AdapterMismatch) as caught:
        check_contract([part])
    message = str(caught.value)
    assert part.path in message
    assert problem in message
    assert "vllm" in message


def test_another_nnsight_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("capture.adapters.contract.NNSIGHT", "0.9.0")
    with pytest.raises(AdapterMismatch, match=r"made for 0\.9\.0 exactly"):
        check_contract([])
