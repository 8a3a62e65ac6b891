"""Which rank an engine of several died of, told by how their processes ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from capture.adapters.vllm_engine import StepEngine


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ((), None),
        ((None, None), None),
        ((-15, -9), 1),
        ((0, -9, None), 1),
        ((1, -9), 1),
        ((1, -15), 0),
        ((-15, -15), None),
    ],
)
def test_the_rank_that_ended_by_itself_is_named(codes: tuple, rank: int | None) -> None:
    workers = [
        SimpleNamespace(rank=r, proc=SimpleNamespace(exitcode=c)) for r, c in enumerate(codes)
    ]
    executor = SimpleNamespace(workers=workers) if codes else SimpleNamespace()
    engine = SimpleNamespace(model_executor=executor)
    model = SimpleNamespace(vllm_entrypoint=SimpleNamespace(llm_engine=engine))
    assert StepEngine(model).lost_rank == rank
