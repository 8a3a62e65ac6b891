"""A number that names a place must be one: nothing is rounded, wrapped, or taken from a flag."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr

from store.errors import PromptNotFound, RunError, SelectionError, SiteNotFound
from store.export import ExportSelection, export
from store.objects.local import LocalStore
from store.run import Run, open_run
from store.selection import select
from tests.store.sample_run import SampleShape, write_run

PAST_INT64: list[Any] = [
    2**63,
    2**64 - 1,
    2**200,
    -(2**64) + 1,
    np.uint64(2**64 - 1),
    [2**64 - 1],
    [2**64, 0],
    [2**64 - 1, -1],
    np.array([2**64 - 2], np.uint64),
    np.array([2**70], object),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("numbers")
    write_run(LocalStore(folder), SampleShape(), [[5, 3]])
    return open_run(str(folder))


@pytest.mark.parametrize("number", PAST_INT64, ids=repr)
@pytest.mark.parametrize("by_place", [False, True])
def test_no_number_wraps_into_another(run: Run, number: Any, by_place: bool) -> None:
    for name, error in (("pos", SelectionError), ("layer", SiteNotFound), ("head", SiteNotFound)):
        with pytest.raises(error, match=r"is not there|counts from the end"):
            run.read("z", prompt=0, by_place=by_place, **{name: number})
        if name != "pos":
            with pytest.raises(error):
                run.pattern(0, by_place=by_place, **{name: number})
    for name in ("query", "key"):
        with pytest.raises(SelectionError):
            run.pattern(0, by_place=by_place, **{name: number})
        with pytest.raises(SelectionError):
            run.scores(0, by_place=by_place, **{name: number})


@pytest.mark.parametrize("number", PAST_INT64, ids=repr)
def test_no_number_wraps_in_what_goes_over_many(run: Run, number: Any, tmp_path) -> None:
    for choices in ({"pos": number}, {"layers": number}, {"heads": number}):
        with pytest.raises(RunError):
            list(run.batches(["z"], **choices))
        with pytest.raises(RunError):
            run.moments("z", **choices)
        with pytest.raises(RunError):
            run.top_rows("z", **choices)
        with pytest.raises(RunError):
            export(run, "numpy", tmp_path / "out", ExportSelection(sites=["z"], **choices))
    with pytest.raises(SelectionError, match="no token id"):
        run.attention_to(number if isinstance(number, (list, np.ndarray)) else [number])
    if isinstance(number, int):
        with pytest.raises(SiteNotFound):
            run.cache(0)["z", number]


def test_a_slice_may_reach_past_every_number() -> None:
    huge = np.uint64(2**64 - 1)
    for stop in (2**64, huge):
        assert select("pos", range(4), slice(2, stop)).labels.tolist() == [2, 3]
        assert select("pos", range(4), slice(stop, None)).labels.tolist() == []
        assert select("pos", range(4), slice(stop, None, -2)).labels.tolist() == [3, 1]
        assert select("pos", range(4), slice(None, None, stop)).labels.tolist() == [0]
    assert select("pos", range(4), slice(-(2**64), 2)).labels.tolist() == [0, 1]


@pytest.mark.parametrize("choice", [[True, 2], [1, 1.0], [None], b"1", ["1"], slice(True, 3), 1.0])
def test_what_is_no_integer_is_a_type_error(choice: Any) -> None:
    with pytest.raises(TypeError, match="int"):
        select("pos", range(4), choice)


def test_integers_of_every_kind_are_taken() -> None:
    for choice in ([np.uint8(1)], np.array([1], np.uint64), xr.DataArray([1]), range(1, 2), (1,)):
        assert select("pos", range(4), choice).labels.tolist() == [1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt", [1.7, 1.0, np.float64(1), True, np.True_, None, b"p1", (1,)], ids=repr
)
def test_only_an_id_or_a_row_names_a_prompt(run: Run, prompt: Any, tmp_path) -> None:
    for call in (
        lambda: run.read("z", prompt=prompt),
        lambda: run.pattern(prompt),
        lambda: run.tokens(prompt),
        lambda: run.cache(prompt),
        lambda: run.batches(["z"], prompts=[prompt]),
        lambda: run.moments("z", prompts=[prompt]),
        lambda: run.top_rows("z", prompts=[prompt]),
        lambda: run.head_scores(prompts=[prompt]),
        lambda: run.explain("z", prompt=[prompt]),
        lambda: export(run, "numpy", tmp_path / "out", ExportSelection(prompts=[prompt])),
    ):
        with pytest.raises(PromptNotFound, match="names no prompt: give its id"):
            call()


@pytest.mark.parametrize("prompt", [2**64, np.uint64(2**64 - 1), -(2**64)])
def test_no_row_wraps(run: Run, prompt: Any) -> None:
    with pytest.raises(PromptNotFound, match="no prompt row"):
        run.read("z", prompt=prompt)
    with pytest.raises(PromptNotFound, match="no prompt row"):
        run.batches(["z"], prompts=[prompt])


def test_rows_of_every_integer_kind_are_taken(run: Run) -> None:
    want = run.read("z", prompt=1).values
    for prompt in (np.int64(1), np.uint8(1), np.array(1), xr.DataArray(1), -1):
        np.testing.assert_array_equal(run.read("z", prompt=prompt).values, want)  # type: ignore[arg-type]
    assert run.explain("z", prompt=np.int64(1)) == run.explain("z", prompt=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", ["p1", b"p1", 1])
def test_one_prompt_is_no_list_of_prompts(run: Run, prompts: Any) -> None:
    with pytest.raises(PromptNotFound, match="in a list"):
        run.batches(["z"], prompts=prompts)
    with pytest.raises(PromptNotFound, match="in a list"):
        run.attention_to([1], prompts=prompts)


@pytest.mark.parametrize("tokens", [[1.5], [1.0], ["1"], [True], [None], b"1", 1.5, None])
def test_a_token_id_is_an_integer(run: Run, tokens: Any) -> None:
    with pytest.raises(TypeError, match="tokens="):
        run.attention_to(tokens)


@pytest.mark.parametrize("number", [-1, 2**31])
def test_a_token_id_is_one_that_can_be(run: Run, number: int) -> None:
    with pytest.raises(SelectionError, match="no token id"):
        run.attention_to([number])
    assert run.attention_to(np.array([1], np.uint64)).dims == ("layer", "head")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1.0, True, "1"])
@pytest.mark.parametrize("name", ["size", "buffer_bytes", "shuffle", "position"])
def test_a_stream_is_ordered_by_integers(run: Run, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name}=.*give ints"):
        run.batches(["z"], **{name: value})
    with pytest.raises(TypeError, match=r"worker=.*give ints"):
        run.batches(["z"], worker=(value, 2))


@pytest.mark.parametrize("layer", [[0, 1], [0], None, slice(0, 1), True, 1.0])
def test_a_contribution_is_of_one_layer(run: Run, layer: Any) -> None:
    with pytest.raises(TypeError, match="layer="):
        run.contribution(0, layer)
    with pytest.raises(TypeError, match="layer="):
        run.output_bias(layer)
