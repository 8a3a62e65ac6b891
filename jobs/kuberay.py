"""A RayJob manifest for KubeRay: a cluster of its own for one run, made anew by every retry.

The config travels as a ConfigMap and credentials as a Secret that the cluster's owner keeps; a
retry's brand-new cluster resumes from the store alone. Exit code 75 counts as a failure for
Kubernetes, which is what makes `backoffLimit` run the job again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from jobs.config import RunConfig
from jobs.errors import ConfigError
from jobs.submit import CONFIG_NAME

CONFIG_FOLDER = "/etc/attnstore"


@dataclass(frozen=True, slots=True)
class PodShape:
    """What the manifest's pods are made of."""

    image: str
    name: str = "attnstore"
    cpus: int = 8
    memory: str = "64Gi"
    secret: str | None = None
    """A Secret whose entries become the pods' environment (object store credentials)."""
    backoff_limit: int = 20
    gpu_resource: str = "nvidia.com/gpu"
    gpus: int | None = None
    """Per worker; None takes one for each tensor-parallel rank, 0 makes CPU workers."""


class _Readable(yaml.SafeDumper):
    """Writes texts of several lines as they are."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Readable.add_representer(str, _text)


def manifest(config: RunConfig, pods: PodShape) -> str:
    """Return the YAML of a ConfigMap and a RayJob; `ConfigError` for what no pod can reach."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?", pods.name):
        raise ConfigError(f"{pods.name!r} is no name for a Kubernetes object; use a-z, 0-9 and -")
    for field, value in (("output", config.output), ("prompts.source", config.prompts.source)):
        if "://" not in value and not value.startswith("/"):
            raise ConfigError(f"{field} {value!r} is relative: pods need a URL or a mounted path")
    documents = [_config_map(config, pods), _ray_job(config, pods)]
    return yaml.dump_all(documents, Dumper=_Readable, sort_keys=False)


def _config_map(config: RunConfig, pods: PodShape) -> dict[str, Any]:
    body = config.model_dump(mode="json", exclude_defaults=True, exclude={"storage_options": True})
    body.get("prompts", {}).pop("options", None)
    # Stated, since the driver may look before the first GPU node has joined.
    body["workers"] = {
        **body.get("workers", {}),
        "address": "auto",
        "num_gpus": _gpus(config, pods),
        "num_cpus": 1,
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": pods.name},
        "data": {CONFIG_NAME: yaml.safe_dump(body, sort_keys=False)},
    }


def _ray_job(config: RunConfig, pods: PodShape) -> dict[str, Any]:
    gpus = _gpus(config, pods)
    grace = int(config.workers.drain_seconds) + 60
    workers = config.workers
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": pods.name},
        "spec": {
            "entrypoint": _entrypoint(),
            "submissionMode": "K8sJobMode",
            "backoffLimit": pods.backoff_limit,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": {
                "enableInTreeAutoscaling": workers.lowest < workers.highest,
                "headGroupSpec": {
                    # The head runs the driver and no engine: it must never wait behind one.
                    "rayStartParams": {"num-gpus": "0", "num-cpus": "0"},
                    "template": _pod("ray-head", pods, {"cpu": "2", "memory": "8Gi"}, grace),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "engines",
                        "replicas": workers.highest,
                        "minReplicas": workers.lowest,
                        "maxReplicas": workers.highest,
                        "rayStartParams": {},
                        "template": _pod("ray-worker", pods, _resources(pods, gpus), grace),
                    }
                ],
            },
        },
    }


def _gpus(config: RunConfig, pods: PodShape) -> int:
    return config.engine.tensor_parallel_size if pods.gpus is None else pods.gpus


def _entrypoint() -> str:
    """Run; some failed prompts (3) are no reason to make another cluster."""
    run = f"attnstore run {CONFIG_FOLDER}/{CONFIG_NAME}"
    return f"sh -c '{run}; code=$?; if [ $code -eq 3 ]; then exit 0; fi; exit $code'"


def _resources(pods: PodShape, gpus: int) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": str(pods.cpus), "memory": pods.memory}
    return {**resources, pods.gpu_resource: gpus} if gpus else resources


def _pod(name: str, pods: PodShape, resources: dict[str, Any], grace: int) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": name,
        "image": pods.image,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if pods.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": pods.secret}}]
    return {
        "spec": {
            "terminationGracePeriodSeconds": grace,
            "containers": [container],
            "volumes": [
                {"name": "config", "configMap": {"name": pods.name}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }
