"""What travels with a submitted job: the code, the config, a small prompt file; nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from jobs.config import RunConfig
from jobs.config_file import load_config
from jobs.errors import ConfigError
from jobs.submit import CONFIG_NAME, Submitted, stage, submission_base, submit

Configs = Callable[..., RunConfig]


def test_the_staged_folder_has_code_config_and_prompts(
    make_config: Configs, write_prompts: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_prompts(["w1", "w2"])
    monkeypatch.chdir(tmp_path)
    config = make_config(Path("prompts.jsonl"), workers={"address": "auto", "count": 3})
    folder = tmp_path / "staged"
    folder.mkdir()
    stage(config, folder)
    assert (folder / "jobs" / "cli.py").exists()
    assert (folder / "store" / "run.py").exists()
    assert not list(folder.rglob("__pycache__"))
    monkeypatch.chdir(folder)
    shipped = load_config(CONFIG_NAME)
    assert Path(shipped.prompts.source).read_text() == (tmp_path / "prompts.jsonl").read_text()
    assert shipped.workers.address is None
    assert shipped.frozen_fields() == config.frozen_fields()
    assert yaml.safe_load((folder / CONFIG_NAME).read_text())["output"] == config.output


def test_what_no_worker_could_reach_is_refused(make_config: Configs, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is relative"):
        stage(make_config(Path("s3://b/p.jsonl"), output="./run"), tmp_path)
    with pytest.raises(ConfigError, match="cannot be shipped"):
        stage(make_config(Path("nowhere.jsonl")), tmp_path / "other")


def test_ids_of_jobs_go_by_the_output() -> None:
    assert submission_base("s3://b/run") == submission_base("s3://b/run")
    assert submission_base("s3://b/run") != submission_base("s3://b/run2")
    assert submission_base("s3://b/run").startswith("attnstore-s3-b-run-")


class _RacedClient:
    """A cluster on which somebody else's submission comes between the look and ours."""

    def __init__(self, *, others: bool) -> None:
        self._others, self._jobs = others, list[SimpleNamespace]()

    def list_jobs(self) -> list[SimpleNamespace]:
        return list(self._jobs)

    def submit_job(self, *, submission_id: str, **_: object) -> None:
        if self._others:
            running = SimpleNamespace(value="RUNNING")
            self._jobs.append(SimpleNamespace(submission_id=submission_id, status=running))
        raise RuntimeError(f"Job with submission_id {submission_id} already exists.")


def test_a_job_submitted_at_the_same_moment_by_another_is_found(
    make_config: Configs, write_prompts: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(write_prompts(["w1"]))
    client = _RacedClient(others=True)
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda _address: client)
    name = f"{submission_base(config.output)}-1"
    assert submit(config, "http://dashboard") == Submitted(name, created=False)
    client = _RacedClient(others=False)
    with pytest.raises(RuntimeError, match="already exists"):
        submit(config, "http://dashboard")
