"""Submit a run to a Ray cluster as a job: ships this code and the config, under an idempotent id.

The id goes by the run's output, so submitting twice finds the job that already works on it. Ray
never lets an ended job's id be used again: a resume gets the next number.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jobs.config import RunConfig
from jobs.errors import ConfigError
from store.byte_count import human_bytes

PACKAGES = ("capture", "jobs", "store")
SHIPPED_BYTES = 64 << 20
CONFIG_NAME = "run-config.yaml"
_LIVE = {"PENDING", "RUNNING"}


@dataclass(frozen=True, slots=True)
class Submitted:
    """The job that works on the run now, and whether this call made it."""

    submission_id: str
    created: bool


def submit(config: RunConfig, address: str, *, arguments: tuple[str, ...] = ()) -> Submitted:
    """Submit `attnstore run` to the cluster whose dashboard is at `address`.

    Returns the job already at work on the run's output, if there is one. Raises `ConfigError` where
    the cluster does not answer or the config names files that it cannot reach.
    """
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no Ray dashboard answers at {address!r}: {error}") from error
    base = submission_base(config.output)
    jobs = _jobs_of(client, base)
    if live := _live(jobs):
        return Submitted(live, created=False)
    submission_id = f"{base}-{len(jobs) + 1}"
    with tempfile.TemporaryDirectory(prefix="attnstore-submit-") as folder:
        staged = stage(config, Path(folder))
        words = ["python", "-m", "jobs.cli", "run", CONFIG_NAME, *arguments]
        try:
            client.submit_job(
                entrypoint=" ".join(words),
                submission_id=submission_id,
                runtime_env={"working_dir": str(staged)},
                metadata={"attnstore_output": config.output},
            )
        except RuntimeError:
            # Ray takes an id once: somebody else may have submitted this run in the meantime.
            if live := _live(_jobs_of(client, base)):
                return Submitted(live, created=False)
            raise
    return Submitted(submission_id, created=True)


def submission_base(output: str) -> str:
    """Return what the ids of all jobs of one output begin with."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", output).strip("-")[-40:].lower()
    return f"attnstore-{words}-{hashlib.sha256(output.encode()).hexdigest()[:8]}"


def stage(config: RunConfig, folder: Path) -> Path:
    """Fill a folder with the code, the config and a small local prompt source; return it.

    Raises `ConfigError` for an output or a source on this machine's disk that no worker would see.
    """
    if "://" not in config.output and not Path(config.output).is_absolute():
        raise ConfigError(
            f"output {config.output!r} is relative: on a cluster it must be a URL, or an absolute "
            "path on a disk that all nodes share"
        )
    root = Path(__file__).resolve().parent.parent
    for package in PACKAGES:
        shutil.copytree(
            root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    body = _body(config)
    source = Path(config.prompts.source)
    if "://" not in config.prompts.source and not source.is_absolute():
        if not source.is_file() or source.stat().st_size > SHIPPED_BYTES:
            raise ConfigError(
                f"prompts.source {config.prompts.source!r} cannot be shipped with the job (one "
                f"file of at most {human_bytes(SHIPPED_BYTES)} can); give a URL or a shared path"
            )
        target = folder / "prompts" / source.name
        target.parent.mkdir()
        shutil.copy2(source, target)
        body["prompts"]["source"] = f"prompts/{source.name}"
    (folder / CONFIG_NAME).write_text(yaml.safe_dump(body, sort_keys=False))
    return folder


def _body(config: RunConfig) -> dict[str, Any]:
    """The whole config, credentials included: they travel to the cluster, and only there."""
    body = config.model_dump(mode="json", exclude_defaults=True)
    body["workers"] = {**body.get("workers", {}), "address": None}
    return body


def _jobs_of(client: Any, base: str) -> dict[str, str]:
    """Return the status of every job, ended ones included, of one output by its id."""
    of_run = re.compile(re.escape(base) + r"-\d+")
    return {
        job.submission_id: str(job.status.value)
        for job in client.list_jobs()
        if of_run.fullmatch(job.submission_id or "")
    }


def _live(jobs: dict[str, str]) -> str | None:
    return next((name for name, status in jobs.items() if status in _LIVE), None)
