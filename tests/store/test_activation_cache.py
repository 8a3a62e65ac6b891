"""The TransformerLens mapping, its tensors, and the training stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from store.errors import SiteNotFound
from store.objects.local import LocalStore
from store.run import Run, open_run
from store.torch_adapter import AttentionRows, TorchCache, as_tensor
from tests.store.sample_run import SampleShape, write_run

LENGTHS = [[40, 0, 7], [1, 300]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("cached")
    write_run(LocalStore(folder), SampleShape(dtype="bfloat16"), LENGTHS)
    return open_run(str(folder))


def test_names_and_shapes_are_transformer_lens(run: Run) -> None:
    cache = run.cache("p2")
    assert cache["blocks.1.attn.hook_z"].shape == (1, 7, 4, 16)
    assert cache["v", 0].shape == (1, 7, 2, 16)
    assert cache["blocks.0.attn.hook_pattern"].shape == (1, 4, 7, 7)
    assert cache["z", -1] is cache["z", 1]
    bare = cache.remove_batch_dim()
    assert bare["rot_q", 1].shape == (7, 4, 16)
    np.testing.assert_array_equal(
        bare["z", 1],
        run.read("z", prompt="p2", layer=1, dtype="float32").values.swapaxes(0, 1),
    )
    np.testing.assert_array_equal(bare["pattern", 1], run.pattern("p2", 1).values)
    np.testing.assert_array_equal(bare["attn_scores", 0], run.scores("p2", 0).values)
    assert bare.stack_activation("z").shape == (2, 7, 4, 16)


def test_it_is_a_mapping_of_what_there_is(run: Run) -> None:
    cache = run.cache("p2")
    assert len(cache) == 2 * 6
    assert set(cache) >= {"blocks.0.attn.hook_rot_q", "blocks.1.attn.hook_attn_scores"}
    assert all(name in cache for name in cache)
    assert ("z", 0) in cache
    assert ("z", 9) not in cache
    assert "blocks.0.attn.hook_q" not in cache
    assert "p2" in repr(cache)
    with pytest.raises(SiteNotFound, match="before the rotary embedding"):
        cache["q", 0]
    with pytest.raises(SiteNotFound, match="names no layer"):
        cache["z"]


def test_tensors_keep_bfloat16_bits(run: Run) -> None:
    stored = run.read("z", prompt="p4")
    tensor = as_tensor(stored)
    assert tensor.dtype == torch.bfloat16
    assert tensor.view(torch.int16).numpy().tobytes() == stored.values.tobytes()
    cache = TorchCache(run.cache("p4", dtype=stored.dtype))
    assert cache["z", 0].dtype == torch.bfloat16
    assert cache["pattern", 0].shape == (1, 4, 300, 300)
    assert torch.equal(cache.stack_activation("z")[1], cache["z", 1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gets_every_row_once(run: Run, workers: int) -> None:
    rows = AttentionRows(run.url, ["z"], layers=[1], size=64, shuffle=3)
    loader = DataLoader(
        rows,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )
    seen = []
    for item in loader:
        assert item["z"].shape[1:] == (1, 4, 16)
        assert item["z"].dtype == torch.bfloat16
        seen += list(zip(item["prompt"].tolist(), item["pos"].tolist(), strict=True))
    want = [(p, i) for p, n in enumerate([40, 0, 7, 1, 300]) for i in range(n)]
    assert sorted(seen) == want


def test_each_worker_goes_on_after_its_last_batch(run: Run, monkeypatch) -> None:
    def stream(worker: int, **more: Any) -> list[dict[str, Any]]:
        info = SimpleNamespace(id=worker, num_workers=2)
        monkeypatch.setattr("store.torch_adapter.get_worker_info", lambda: info)
        return list(AttentionRows(run.url, ["z"], size=30, shuffle=3, **more))

    whole = [stream(worker) for worker in (0, 1)]
    assert [{item["worker"] for item in items} for items in whole] == [{0}, {1}]
    positions = {worker: whole[worker][0]["position"] for worker in (0, 1)}
    for worker in (0, 1):
        rest = stream(worker, positions=positions)
        assert [item["position"] for item in rest] == [i["position"] for i in whole[worker][1:]]
        for mine, before in zip(rest, whole[worker][1:], strict=True):
            assert torch.equal(mine["z"], before["z"])
            assert torch.equal(mine["pos"], before["pos"])


def test_what_is_kept_cannot_be_written_to(run: Run) -> None:
    cache = run.cache("p2")
    for name in ("z", "pattern"):
        with pytest.raises(ValueError, match="read-only"):
            cache[name, 0][:] = 0
        before = cache[name, 0].copy()
        TorchCache(cache)[name, 0].zero_()
        np.testing.assert_array_equal(cache[name, 0], before)
