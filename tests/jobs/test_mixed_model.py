"""Of a model that mixes attention with other layers a run holds, and says, the attention layers."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.config import RunConfig
from jobs.dry_run import preview
from jobs.errors import ConfigError
from jobs.estimate import Rates
from jobs.event_log import EventLog
from jobs.model_identity import attention_shape, captured_layers, check_chosen, check_supported
from jobs.prepare import create_run, read_manifest
from jobs.status import read_status
from store.objects.open import open_store
from tests.jobs.test_cli import attnstore

Configs = Callable[..., RunConfig]
Prompts = Callable[..., Path]

KINDS = ["conv", "full_attention", "conv", "sliding_attention", "moe"]


@pytest.fixture
def mixed_config(
    tmp_path: Path, word_model: Path, make_config: Configs, write_prompts: Prompts
) -> Callable[..., RunConfig]:
    folder = tmp_path / "mixed"
    shutil.copytree(word_model, folder)
    body = json.loads((folder / "config.json").read_text())
    body |= {"model_type": "lfm2", "num_hidden_layers": len(KINDS), "layer_types": KINDS}
    (folder / "config.json").write_text(json.dumps(body))

    def make(**capture: object) -> RunConfig:
        source = write_prompts(["w1 w2 w3"] * 4)
        section = {"unit_tokens": 8, **capture}
        return make_config(source, model={"path": str(folder)}, capture=section)

    return make


def test_bytes_are_those_of_the_attention_layers(mixed_config) -> None:
    both, one = preview(mixed_config(), Rates()), preview(mixed_config(layers=[3]), Rates())
    assert (both.layers, one.layers) == ((1, 3), (3,))
    assert both.raw_bytes == 2 * one.raw_bytes
    assert both.largest_unit_bytes == 2 * one.largest_unit_bytes
    assert one.without_attention == {"conv": (0, 2), "moe": (4,)}
    shape = attention_shape(mixed_config().model)
    assert shape.layers == (1, 3)
    assert shape.captured([3, 1, 3]) == (1, 3)


def test_the_run_says_which_layers_have_none(mixed_config) -> None:
    config = mixed_config()
    objects = open_store(config.output)
    create_run(objects, config)
    bare = {"conv": [0, 2], "moe": [4]}
    assert read_manifest(objects).layers_without_attention == bare
    assert read_status(objects).as_json()["layers_without_attention"] == bare
    shown = attnstore("status", config.output).stdout
    assert "without attention: 0, 2 (conv), 4 (moe)" in shown


def test_a_model_of_attention_alone_says_nothing_of_it(
    make_config: Configs, write_prompts: Prompts
) -> None:
    config = make_config(write_prompts(["w1 w2"]))
    objects = open_store(config.output)
    create_run(objects, config)
    assert read_manifest(objects).layers_without_attention == {}
    assert "layers_without_attention" not in read_status(objects).as_json()
    assert "without" not in attnstore("status", config.output).stdout


def test_a_dry_run_and_the_log_say_which_layers_are_captured(mixed_config, tmp_path: Path) -> None:
    from jobs.driver import RunOptions, _prepare

    config = mixed_config(layers=[3])
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json", exclude_defaults=True)))
    shown = attnstore("run", path, "--dry-run").stdout
    assert "3; without attention: 0, 2 (conv), 4 (moe)" in shown
    found = json.loads(attnstore("run", path, "--dry-run", "--json").stdout)
    assert found["layers"] == [3]
    assert found["layers_without_attention"] == {"conv": [0, 2], "moe": [4]}
    log = io.StringIO()
    objects = open_store(config.output)
    _prepare(objects, config, None, RunOptions(), EventLog(stream=log))
    assert "layers captured=3 others=without attention: 0, 2 (conv), 4 (moe)" in log.getvalue()
    assert captured_layers(config.model, mixed_config().capture) == (1, 3)


def test_a_layer_without_attention_is_refused_before_anything_is_written(mixed_config) -> None:
    check_supported(mixed_config().model, mixed_config().engine_settings())
    check_chosen(mixed_config().model, mixed_config(layers=[1, 3]).capture)
    config = mixed_config(layers=[1, 2, 7])
    text = r"capture.layers names \[2, 7\], where .* has no attention \(layer 2 is conv\): .* 1, 3;"
    with pytest.raises(ConfigError, match=text):
        preview(config, Rates())
    assert not Path(config.output).exists()
