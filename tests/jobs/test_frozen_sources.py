"""What a resume must find unchanged beside the config: the model's files and the probe's source."""

from __future__ import annotations

import importlib
import io
import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from jobs.config import ModelConfig, RunConfig
from jobs.driver import RunOptions
from jobs.driver import run as run_job
from jobs.dry_run import preview
from jobs.errors import ConfigError
from jobs.estimate import Rates
from jobs.event_log import EventLog
from jobs.frozen import check_frozen, frozen_fields
from jobs.local_files import BLOCK_BYTES, MIN_BLOCKS, STRETCH_BYTES, WHOLE_BYTES, blocks, sample
from jobs.model_identity import content
from jobs.prepare import create_run, find_run, read_manifest
from jobs.progress import progress_view
from store import keys
from store.errors import FrozenFieldChanged
from store.objects.open import open_store
from store.run_format import RunManifest

Configs = Callable[..., RunConfig]
Prompts = Callable[..., Path]

PROBE = "def norms(layer, q, k, v, z, spans):\n    return {'zn': z.norm(dim=-1) * FACTOR}\n"


@pytest.fixture
def probe_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "probes"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [name for name in sys.modules if name.startswith("frozen_")]:
        del sys.modules[name]


def write(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    importlib.invalidate_caches()


def test_a_probe_changed_between_two_runs_of_one_folder_is_refused(
    make_config: Configs, write_prompts: Prompts, probe_folder: Path
) -> None:
    file = probe_folder / "frozen_probe.py"
    write(file, PROBE)
    config = make_config(write_prompts(["w1"]), capture={"probe": "frozen_probe:norms"})
    objects = open_store(config.output)
    create_run(objects, config)
    assert find_run(objects, config) is not None
    before = frozen_fields(config)["capture.probe_source"]
    write(file, PROBE.replace("FACTOR", "1000"))
    with pytest.raises(FrozenFieldChanged, match=r"capture\.probe_source is frozen") as refused:
        find_run(objects, config)
    now = frozen_fields(config)["capture.probe_source"]
    assert before != now
    assert before in str(refused.value)
    assert now in str(refused.value)
    write(file, PROBE)
    assert find_run(objects, config) is not None


@pytest.mark.parametrize("changed", ["__init__.py", "inner.py"])
def test_a_package_that_passes_a_probe_on_is_held_to_both_files(
    make_config: Configs, write_prompts: Prompts, probe_folder: Path, changed: str
) -> None:
    package = probe_folder / "frozen_package"
    write(package / "inner.py", PROBE)
    write(package / "__init__.py", "from frozen_package.inner import norms as norms\n")
    config = make_config(write_prompts(["w1"]), capture={"probe": "frozen_package:norms"})
    objects = open_store(config.output)
    create_run(objects, config)
    file = package / changed
    write(file, file.read_text() + "# another\n")
    with pytest.raises(FrozenFieldChanged, match=r"capture\.probe_source"):
        find_run(objects, config)


def test_a_probe_bound_by_partial_is_held_to_its_own_module(
    make_config: Configs, write_prompts: Prompts, probe_folder: Path
) -> None:
    write(probe_folder / "frozen_inner.py", PROBE)
    text = "import functools, frozen_inner\nbound = functools.partial(frozen_inner.norms)\n"
    write(probe_folder / "frozen_bound.py", text)
    config = make_config(write_prompts(["w1"]), capture={"probe": "frozen_bound:bound"})
    before = frozen_fields(config)
    write(probe_folder / "frozen_inner.py", PROBE + "# another\n")
    assert frozen_fields(config) != before


@pytest.mark.parametrize("probe", ["no_such_module:norms", "math:no_such", "sys:path", "sys:exit"])
def test_a_probe_that_cannot_be_held_to_its_source_is_refused_before_a_run_is_made(
    make_config: Configs, write_prompts: Prompts, probe: str
) -> None:
    config = make_config(write_prompts(["w1"]), capture={"probe": probe})
    with pytest.raises(ConfigError, match=r"capture\.probe"):
        create_run(open_store(config.output), config)
    assert not Path(config.output).exists()


def test_runs_of_before_without_the_later_fields_resume(
    make_config: Configs, write_prompts: Prompts, probe_folder: Path
) -> None:
    write(probe_folder / "frozen_old.py", PROBE)
    config = make_config(write_prompts(["w1"]), capture={"probe": "frozen_old:norms"})
    objects = open_store(config.output)
    create_run(objects, config)
    manifest = read_manifest(objects)
    later = ("model.sampled_content", "model.hub_commit", "capture.probe_source")
    frozen = {name: value for name, value in manifest.frozen.items() if name not in later}
    assert len(frozen) == len(manifest.frozen) - 3
    objects.delete(keys.RUN)
    objects.create(keys.RUN, manifest.model_copy(update={"frozen": frozen}).to_bytes())
    assert find_run(objects, config) is not None
    other = make_config(write_prompts(["w1"]), capture={"probe": "frozen_old:other"})
    write(probe_folder / "frozen_old.py", PROBE + PROBE.replace("norms", "other"))
    importlib.reload(sys.modules["frozen_old"])
    with pytest.raises(FrozenFieldChanged, match=r"capture\.probe is frozen"):
        find_run(objects, other)


@pytest.mark.parametrize("size", [100_000, 3 * WHOLE_BYTES])
def test_weights_of_the_same_size_written_in_place_are_found(
    make_config: Configs, write_prompts: Prompts, word_model: Path, tmp_path: Path, size: int
) -> None:
    model = tmp_path / "model"
    shutil.copytree(word_model, model)
    weights = model / "model.safetensors"
    weights.write_bytes(bytes(size))
    config = make_config(write_prompts(["w1"]), model={"path": str(model)})
    objects = open_store(config.output)
    create_run(objects, config)
    assert find_run(objects, config) is not None
    weights.write_bytes(b"\1" * size)
    with pytest.raises(FrozenFieldChanged, match=r"model\.sampled_content is frozen") as refused:
        find_run(objects, config)
    assert frozen_fields(config)["model.sampled_content"] in str(refused.value)
    weights.write_bytes(bytes(size))
    assert find_run(objects, config) is not None


@pytest.mark.parametrize("size", [0, 1, WHOLE_BYTES, WHOLE_BYTES + 1, 10 * STRETCH_BYTES + 7])
def test_first_and_last_bytes_are_read_and_no_stretch_is_left_out(size: int) -> None:
    found = blocks(size)
    assert found[0][0] == 0
    assert sum(found[-1]) == size
    assert all(start + length <= size for start, length in found)
    gaps = [after[0] - sum(before) for before, after in itertools.pairwise(found)]
    assert max(gaps, default=0) <= STRETCH_BYTES
    assert len(found) > MIN_BLOCKS or sum(length for _, length in found) == size


def test_hundreds_of_gigabytes_are_sampled_and_not_read() -> None:
    size = 400 << 30
    assert sum(length for _, length in blocks(size)) <= size // 4000


def test_any_written_stretch_of_a_large_file_is_found(tmp_path: Path) -> None:
    file, size = tmp_path / "weights", 80 * STRETCH_BYTES
    with file.open("wb") as opened:
        opened.truncate(size)
    before = sample(file)
    for start in (1, size // 3, size - STRETCH_BYTES - 2 * BLOCK_BYTES):
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(b"\1" * (STRETCH_BYTES + 2 * BLOCK_BYTES))
        assert sample(file) != before, start
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(bytes(STRETCH_BYTES + 2 * BLOCK_BYTES))
        assert sample(file) == before


def test_a_tokenizer_elsewhere_and_a_model_of_one_file_count_too(tmp_path: Path) -> None:
    one, tokenizer = tmp_path / "model.gguf", tmp_path / "tokenizer"
    one.write_bytes(b"weights")
    tokenizer.mkdir()
    (tokenizer / "spiece.spm").write_bytes(b"pieces")
    model = ModelConfig(path=str(one), tokenizer=str(tokenizer))
    found = {content(model)}
    one.write_bytes(b"WEIGHTS")
    found.add(content(model))
    (tokenizer / "spiece.spm").write_bytes(b"PIECES")
    found.add(content(model))
    assert len(found) == 3
    assert content(ModelConfig(path="some/hub-name")) is None


def test_a_name_that_is_taken_is_refused_before_anything_starts(
    make_config: Configs, write_prompts: Prompts, probe_folder: Path
) -> None:
    write(
        probe_folder / "frozen_named.py", PROBE.replace("'zn'", "'scores'").replace("FACTOR", "1")
    )
    config = make_config(write_prompts(["w1"]), capture={"probe": "frozen_named:norms"})
    with pytest.raises(ConfigError, match="'scores' cannot be a site's name"):
        preview(config, Rates())
    log = EventLog(stream=io.StringIO(), as_json=True)
    with pytest.raises(ConfigError, match="'scores' cannot be a site's name"):
        run_job(config, RunOptions(), log, progress_view)
    assert not Path(config.output, "run.json").exists()


def hub_with(folder: Path, commits: dict[str, str]) -> None:
    """Make the hub's cache hold a model; `commits` says what each branch stands for."""
    place = folder / "models--some--model"
    for branch, commit in commits.items():
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / branch).write_text(commit)
        snapshot = place / "snapshots" / commit
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text('{"model_type": "llama"}')


def test_a_branch_of_the_hub_that_has_moved_is_refused(
    make_config: Configs,
    write_prompts: Prompts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    old, new = "a" * 40, "b" * 40
    model = {"path": "some/model", "max_model_len": 64}
    config = make_config(write_prompts(["w1"]), model=model)
    unknown = frozen_fields(config)
    assert unknown["model.hub_commit"] is None
    hub_with(tmp_path, {"main": old, "tried": new})
    before = frozen_fields(config)
    assert before["model.hub_commit"] == old
    of_branch = make_config(write_prompts(["w1"]), model={**model, "revision": "tried"})
    assert frozen_fields(of_branch)["model.hub_commit"] == new
    manifest = RunManifest(
        run_id="0" * 32, created="2026-01-01T00:00:00+00:00", frozen=before, config={}, versions={}
    )
    check_frozen(manifest, before)
    check_frozen(manifest, unknown)
    hub_with(tmp_path, {"main": new})
    with pytest.raises(FrozenFieldChanged, match=rf"hub_commit is frozen.*{old}.*{new}"):
        check_frozen(manifest, frozen_fields(config))
    hub_with(tmp_path, {old: old})
    pinned = make_config(write_prompts(["w1"]), model={**model, "revision": old})
    check_frozen(manifest, frozen_fields(pinned))
    with pytest.raises(FrozenFieldChanged, match=r"model\.fingerprint"):
        check_frozen(manifest, frozen_fields(of_branch))
    other = make_config(write_prompts(["w1"]), model={**model, "path": "some/other"})
    with pytest.raises(FrozenFieldChanged, match=r"model\.fingerprint"):
        check_frozen(manifest, frozen_fields(other))
