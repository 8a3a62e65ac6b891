"""Runs as PyTorch tensors and datasets. The one module of `store` that imports torch.

Nothing imports this module: reading needs no torch. bfloat16 keeps its bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from store.activation_cache import PromptCache
from store.batches import Batches
from store.run import Run, open_run
from store.site_names import SiteName

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def as_tensor(values: xr.DataArray | NDArray[Any]) -> torch.Tensor:
    """Return a tensor of the same values and type, sharing memory where that is safe."""
    array = values.values if isinstance(values, xr.DataArray) else values
    array = np.ascontiguousarray(array)
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class TorchCache(Mapping[SiteName, torch.Tensor]):
    """`run.cache(prompt)` with tensors: what TransformerLens analysis code takes."""

    def __init__(self, cache: PromptCache) -> None:
        self._cache = cache

    def __getitem__(self, name: SiteName) -> torch.Tensor:
        return as_tensor(self._cache[name])

    def __iter__(self) -> Iterator[SiteName]:
        return iter(self._cache)

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, name: object) -> bool:
        return name in self._cache

    def stack_activation(self, name: str) -> torch.Tensor:
        """Return a site of every captured layer, stacked along a new first axis."""
        return as_tensor(self._cache.stack_activation(name))


class AttentionRows(IterableDataset[dict[str, Any]]):
    """A stream of batches for training: `DataLoader(AttentionRows(url, ["z"]), batch_size=None)`.

    Takes the arguments of `Run.batches`. Each DataLoader worker opens the run itself and gets its
    own part of the prompts; start workers with `multiprocessing_context="spawn"`. An item is a dict
    of tensors: one per site [rows, layer, head, d_head], `prompt` and `pos` [rows], and `position`,
    the place of this worker's part to resume from, with `worker`, its number. To resume, give the
    last position of each worker as `positions` and start as many workers again.
    """

    def __init__(
        self,
        url: str,
        sites: Sequence[SiteName],
        *,
        options: Mapping[str, Any] | None = None,
        positions: Mapping[int, int] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self._url = url
        self._sites = list(sites)
        self._options = dict(options or {})
        self._positions = dict(positions or {})
        self._arguments = arguments

    def __iter__(self) -> Iterator[dict[str, Any]]:
        which, count = self._worker()
        for batch in self._batches(which, count):
            item: dict[str, Any] = {
                site: as_tensor(values) for site, values in batch.arrays.items()
            }
            item["prompt"] = torch.from_numpy(batch.prompt)
            item["pos"] = torch.from_numpy(batch.pos)
            item["position"] = batch.position
            item["worker"] = which
            yield item

    def _worker(self) -> tuple[int, int]:
        which, count = self._arguments.get("worker", (0, 1))
        info = get_worker_info()
        if info is not None:
            which, count = which * info.num_workers + info.id, count * info.num_workers
        return which, count

    def _batches(self, which: int, count: int) -> Batches:
        arguments = {**self._arguments, "worker": (which, count)}
        if which in self._positions:
            arguments["position"] = self._positions[which]
        return self._open().batches(self._sites, **arguments)

    def _open(self) -> Run:
        return open_run(self._url, self._options)
