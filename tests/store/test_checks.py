"""What self-checks measured is part of what a run shows, checked like its other documents."""

from __future__ import annotations

import pytest

from jobs.status import read_status
from store import open_run
from store.checks import SelfCheckFigures, is_self_check, self_check_key
from store.errors import DamagedObject, FormatError
from store.objects.local import LocalStore
from store.sealed_json import seal
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, write_run

FIGURES = {
    "run_id": RUN_ID,
    "created": "2026-01-02T00:00:00+00:00",
    "tensor_parallel_size": 2,
    "versions": {"vllm": "0.32.0"},
    "prompts": 4,
    "tokens": 90,
    "batched": 2e-7,
    "batched_at": "z of prompt 0, layer 1, head 2",
    "noise": 0.0,
    "mixed": 3e-7,
    "mixed_at": "prompt 2, layer 0, head 1",
    "tolerance": 1e-3,
    "reference": 8e-7,
    "reference_at": "layer 1, head 3",
    "seconds": 2.5,
}
KEY = self_check_key(2, {"vllm": "0.32.0"})


@pytest.fixture
def run(tmp_path) -> LocalStore:
    objects = LocalStore(tmp_path)
    write_run(objects, SampleShape(), [[4, 3]])
    return objects


def test_a_run_without_a_check_has_none(run) -> None:
    assert open_run(run.url).checks == ()
    assert "checks" not in read_status(run).as_json()


def test_figures_are_shown_by_the_run_and_by_status(run) -> None:
    run.create(KEY, SelfCheckFigures(**FIGURES).to_bytes())
    run.put("checks/probe-0123456789abcdef-0", [b"first"])
    (found,) = open_run(run.url).checks
    assert (found.batched, found.batched_at) == (2e-7, "z of prompt 0, layer 1, head 2")
    (shown,) = read_status(run).as_json()["checks"]
    assert shown == {name: value for name, value in FIGURES.items() if name != "run_id"}
    assert found.sentence() == (
        "4 prompts differ by at most: alone or in a batch 2e-07, pattern @ v 3e-07, "
        "transformers 8e-07"
    )
    assert verify_run(run, deep=True).ok


def test_the_newest_comes_last(run) -> None:
    for ranks, day in ((1, 3), (2, 1), (4, 2)):
        made = {**FIGURES, "tensor_parallel_size": ranks, "created": f"2026-01-0{day}T00:00:00"}
        name = self_check_key(ranks, FIGURES["versions"])
        run.create(name, SelfCheckFigures(**made).to_bytes())
    assert [one.tensor_parallel_size for one in open_run(run.url).checks] == [2, 4, 1]


def test_the_first_runs_figures_are_read_too(run) -> None:
    """They tell neither kind nor when, on how many ranks and by which libraries."""
    later = ("created", "tensor_parallel_size", "versions")
    first = {name: value for name, value in FIGURES.items() if name not in later}
    run.put("checks/self-check.json", [seal(first)])
    (found,) = open_run(run.url).checks
    assert (found.mixed, found.tensor_parallel_size, found.created) == (3e-7, 0, "")
    assert verify_run(run, deep=True).ok


def test_damage_and_figures_of_another_run_are_told_and_stop_nothing(run) -> None:
    other = SelfCheckFigures(**{**FIGURES, "run_id": "f" * 16}).to_bytes()
    whole = SelfCheckFigures(**FIGURES).to_bytes()
    flipped = whole.replace(b'"prompts":4', b'"prompts":5')
    strange = seal({**FIGURES, "more": 1})
    for data, error in ((other, FormatError), (flipped, DamagedObject), (strange, FormatError)):
        run.put(KEY, [data])
        with pytest.raises(error, match=KEY):
            _ = open_run(run.url).checks
        assert [problem.name for problem in verify_run(run, deep=True).problems] == [KEY]
        assert read_status(run).checks == ()
        assert read_status(run).prompts_stored == 2


def test_names_tell_ranks_and_versions_apart() -> None:
    names = {self_check_key(n, {"vllm": v}) for n in (1, 2) for v in ("1", "2")}
    assert len(names) == 4
    assert all(map(is_self_check, [*names, "checks/self-check.json"]))
    assert not is_self_check("checks/probe-0123456789abcdef-0")
