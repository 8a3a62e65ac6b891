"""`model.json` comes from the first engine; a later one that computes otherwise is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from capture.settings import EngineFacts
from jobs.driver import store_model
from jobs.messages import WorkerFacts
from store import keys
from store.errors import FrozenFieldChanged
from store.objects.open import open_store
from store.run_format import ModelManifest
from tests.jobs.fake_worker import model_manifest

RUN_ID = "0" * 32


def facts(model: ModelManifest) -> WorkerFacts:
    return WorkerFacts("node", 1, EngineFacts(model, 64), 0.0)


def test_the_first_engine_s_word_is_kept(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path))
    first = model_manifest(RUN_ID)
    store_model(objects, facts(first), RUN_ID)
    other_versions = first.model_copy(update={"versions": {"vllm": "9.9"}})
    store_model(objects, facts(other_versions), RUN_ID)
    kept = ModelManifest.from_bytes(objects.get(keys.MODEL, max_bytes=1 << 20), keys.MODEL)
    assert kept == first


def test_an_engine_that_computes_otherwise_is_refused_with_both_values(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path))
    first = model_manifest(RUN_ID)
    store_model(objects, facts(first), RUN_ID)
    layer = first.layers[0].model_copy(update={"sliding_window": 7})
    for change in ({"layers": [layer]}, {"dtype": "bfloat16"}, {"hidden_size": 32}):
        with pytest.raises(FrozenFieldChanged, match=next(iter(change))):
            store_model(objects, facts(first.model_copy(update=change)), RUN_ID)
