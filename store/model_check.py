"""Whether what a commit says of its arrays is what the run's model.json says of the model.

A commit names the layers and heads its arrays hold, and `model.json` says how their attention is
computed. Either may have been altered and sealed again; each is checked against the other, and the
model against the fingerprint that every commit carries. Pure but for `read_model`.
"""

from __future__ import annotations

from collections.abc import Iterator

from store import keys
from store.errors import FormatError, ObjectNotFound
from store.objects.protocol import ObjectStore
from store.run_format import ArrayRecord, Commit, LayerSemantics, ModelManifest, Site
from store.sealed_json import MAX_JSON_BYTES
from store.selection import describe


def read_model(objects: ObjectStore, run_id: str) -> ModelManifest | None:
    """Return the run's model, or None while no engine has started. Raises `FormatError`."""
    try:
        data = objects.get(keys.MODEL, max_bytes=MAX_JSON_BYTES)
    except ObjectNotFound:
        return None
    model = ModelManifest.from_bytes(data, keys.MODEL)
    if model.run_id != run_id:
        raise FormatError(f"{keys.MODEL} belongs to run {model.run_id}, not {run_id}")
    return model


def model_contradictions(commit: Commit, model: ModelManifest) -> Iterator[str]:
    """Yield how a commit and the model contradict each other."""
    if commit.model_crc32c is not None and commit.model_crc32c != model.fingerprint:
        yield (
            f"was captured from a model of fingerprint {commit.model_crc32c}, {keys.MODEL} "
            f"describes one of {model.fingerprint}"
        )
    for array in commit.arrays:
        yield from _array_contradictions(array, model)


def _array_contradictions(array: ArrayRecord, model: ModelManifest) -> Iterator[str]:
    layers = [layer.layer for layer in model.layers]
    if array.layers != layers:
        yield (
            f"array {array.site} holds layers {describe(array.layers)}, {keys.MODEL} has "
            f"{describe(layers)}"
        )
        return
    if array.site not in set(Site):
        return
    site = Site(array.site)
    if site is not Site.PATTERN and array.dtype != model.dtype:
        yield f"array {site} is {array.dtype}, {keys.MODEL} says {model.dtype}"
    for layer in model.layers:
        held, size = _heads(site, layer)
        if array.heads and max(array.heads) >= held:
            yield f"array {site} holds head {max(array.heads)}, layer {layer.layer} has {held}"
        elif not array.is_packed and array.head_size != size:
            yield f"array {site} has heads of size {array.head_size}, layer {layer.layer} of {size}"
        else:
            continue
        return


def _heads(site: Site, layer: LayerSemantics) -> tuple[int, int]:
    heads = layer.num_kv_heads if site.is_kv else layer.num_heads
    return heads, layer.v_head_size if site.is_of_v else layer.head_size
