"""Fixtures of the jobs' tests: a tokenizer without a model, prompt files, configs, faults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import jobs.driver
import jobs.ray_pool
import jobs.worker
from jobs.config import RunConfig
from jobs.config_file import parse_config
from tests.jobs.driven import Driven
from tests.jobs.fake_worker import FAULTS
from tests.jobs.local_pool import LocalPool


def _may_mount() -> bool:
    """Whether this process may mount a file system of its own."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
        if shutil.which("mount") is None:
            return False
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
    return True


collect_ignore = [] if _may_mount() else ["test_full_disk.py"]


@pytest.fixture(scope="session")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights whose tokenizer maps `w0` to 0, `w1` to 1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("word-model")
    vocabulary = {f"w{i}": i for i in range(200)} | {"<unk>": 200}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    config = {
        "model_type": "llama", "vocab_size": 201, "max_position_embeddings": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def write_prompts(tmp_path: Path) -> Callable[..., Path]:
    """Write texts (or whole records) as JSONL and return the path."""

    def write(records: Sequence[str | dict[str, Any]], name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        rows = [
            {"id": f"p{i}", "text": record} if isinstance(record, str) else record
            for i, record in enumerate(records)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def make_config(tmp_path: Path, word_model: Path) -> Callable[..., RunConfig]:
    """A config over the word model; keyword arguments replace or add sections."""

    def make(source: Path, **sections: Any) -> RunConfig:
        body: dict[str, Any] = {
            "output": str(tmp_path / "run"),
            "prompts": {"source": str(source)},
            "model": {"path": str(word_model), "dtype": "float32"},
            "capture": {"unit_tokens": 8},
            "workers": {"count": 1, "drain_seconds": 5},
        }
        for name, section in sections.items():
            body[name] = {**body.get(name, {}), **section} if isinstance(section, dict) else section
        return parse_config(body)

    return make


@pytest.fixture(scope="session")
def faults_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that fake engines read, named in the environment before any Ray starts."""
    path = tmp_path_factory.mktemp("faults") / "faults.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULTS, str(path))
        yield path


@pytest.fixture(scope="module")
def ray_address(faults_file: Path) -> Iterator[str]:
    """One Ray on this machine for a module's tests; starting one takes longer than most of them."""
    from ray.cluster_utils import Cluster

    assert os.environ[FAULTS] == str(faults_file)
    head = {"num_cpus": 8, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture
def faults(faults_file: Path) -> Callable[..., Path]:
    """Set what the fake engine does wrong, also while it runs."""
    path = faults_file
    path.write_text("{}")

    def put(**what: Any) -> Path:
        path.write_text(json.dumps(what))
        return path

    return put


@pytest.fixture
def driven(
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., Path],
    faults: Callable[..., Path],
) -> Driven:
    """Runs configs over the word model with the fake worker."""
    return Driven(make_config, write_prompts, faults)


@pytest.fixture
def engine_config(
    tmp_path: Path, tiny_qwen3_dir: Path, write_prompts: Callable[..., Path]
) -> Callable[..., Path]:
    """Write a config for the tiny model; keyword arguments replace or add to its sections."""

    def write(records: Any, **sections: Any) -> Path:
        body: dict[str, Any] = {
            "output": str(tmp_path / "run"),
            "prompts": {"source": str(write_prompts(records))},
            "model": {"path": str(tiny_qwen3_dir), "dtype": "float32", "max_model_len": 256},
            "capture": {"unit_tokens": 256},
            "engine": {
                "max_num_batched_tokens": 256,
                "max_num_seqs": 16,
                "host_bytes": 64 << 20,
                "slot_bytes": 8 << 20,
            },
        }
        for name, section in sections.items():
            body[name] = {**body.get(name, {}), **section} if isinstance(section, dict) else section
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(body))
        return path

    return write


class NoMetrics:
    """There is no Ray to export them."""

    def __init__(self, run_id: str) -> None: ...

    def set(self, snapshot: Any) -> None: ...


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch, driven: Driven) -> Driven:
    """Runs configs with the fake worker in this process."""
    monkeypatch.setattr(jobs.ray_pool, "RayPool", LocalPool)
    monkeypatch.setattr(jobs.ray_pool, "connect", lambda *_arguments, **_options: None)
    monkeypatch.setattr(jobs.ray_pool, "disconnect", lambda: None)
    monkeypatch.setattr(jobs.driver, "RunMetrics", NoMetrics)
    monkeypatch.setattr(jobs.worker, "_leave_soon", lambda: None)
    return driven
