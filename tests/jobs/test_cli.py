"""The command line without a cluster: messages, exit codes, what it prints for machines."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from jobs.cli import app
from jobs.config import RunConfig
from jobs.config_file import load_config
from jobs.kuberay import CONFIG_FOLDER
from jobs.owner import RunOwner
from jobs.plan import PlanProgress
from jobs.prepare import create_run
from jobs.status import read_status
from store import open_run
from store.checks import SelfCheckFigures, self_check_key
from store.errors import RunNotFound
from store.objects.open import open_store
from store.plan import FIRST_MANIFEST

Configs = Callable[..., RunConfig]
Prompts = Callable[..., Path]


def attnstore(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def config_file(tmp_path: Path, make_config: Configs, write_prompts: Prompts) -> Path:
    config = make_config(write_prompts([f"w{i} w1 w2" for i in range(7)] + [""]))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    return path


def test_a_wrong_config_ends_with_2_and_the_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("output: x\nprompts: {source: p}\nmodel: {path: m, dtyp: float32}\n")
    result = attnstore("run", path)
    assert result.exit_code == 2
    assert "did you mean 'dtype'?" in result.stderr


@pytest.mark.parametrize("verb", ["status", "verify", "ls", "gc"])
def test_a_place_without_a_run_is_named(tmp_path: Path, verb: str) -> None:
    result = attnstore(verb, tmp_path / "nowhere")
    assert result.exit_code == 2
    assert f"there is no run at {tmp_path}/nowhere" in result.stderr


def test_a_run_that_is_being_planned_is_told_from_none_and_from_a_lost_one(
    make_config: Callable[..., RunConfig], write_prompts: Callable[..., Path]
) -> None:
    config = make_config(write_prompts(["w1 w2", "w3"]))
    objects = open_store(config.output)
    said: list[str] = []

    def look(_progress: PlanProgress) -> None:
        said.append(attnstore("status", config.output).stderr)
        with pytest.raises(RunNotFound, match=r"is being planned.* plan/0000/prompts-"):
            open_run(config.output)

    owner = RunOwner.claim(objects)
    said.append(attnstore("status", config.output).stderr)
    create_run(objects, config, look)
    owner.release()
    assert len(said) == 2
    assert all(f"the run at {config.output} is being planned, or" in one for one in said)

    manifest = objects.get(FIRST_MANIFEST, max_bytes=1 << 20)
    objects.delete(FIRST_MANIFEST)
    printed = attnstore("status", config.output)
    assert printed.exit_code == 0
    assert "none yet: it is being made" in printed.stdout
    assert not read_status(objects).complete
    objects.put(FIRST_MANIFEST, [manifest])
    objects.delete("run.json")
    lost = attnstore("status", config.output)
    assert lost.exit_code == 2
    assert "has lost its run.json, though plan/0000/manifest.json is there" in lost.stderr
    with pytest.raises(RunNotFound, match="has lost its"):
        open_run(config.output)


def test_a_dry_run_says_what_would_be_stored_and_writes_nothing(
    config_file: Path, tmp_path: Path
) -> None:
    result = attnstore(
        "run", config_file, "--dry-run", "--json", "--tokens-per-second", "10",
        "--store-gb-per-second", "1", "--dollars-per-tb-month", "23",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert (body["prompts"], body["unusable_prompts"], body["tokens"]) == (8, 1, 21)
    assert body["bound_by"] == "the engines"
    assert body["hours"] == pytest.approx(21 / 10 / 3600)
    assert set(body["raw_bytes_per_site"]) == {"rot_q", "rot_k", "v", "z"}
    assert not (tmp_path / "run").exists()


def test_status_of_a_planned_run_counts_everything_as_missing(
    make_config: Configs, write_prompts: Prompts
) -> None:
    config = make_config(write_prompts(["w1 w2", "w3"]))
    create_run(open_store(config.output), config)
    result = attnstore("status", config.output, "--json")
    assert json.loads(result.stdout) == {
        "units": {"planned": 1, "committed": 0, "quarantined": 0},
        "prompts": {"planned": 2, "stored": 0, "failed": 0, "skipped": 0},
        "bytes": 0,
    }
    listed = attnstore("ls", config.output, "--json").stdout.splitlines()
    assert [json.loads(line)["status"] for line in listed] == ["pending", "pending"]


def test_a_resume_with_another_frozen_setting_names_field_and_both_values(
    config_file: Path, make_config: Configs, write_prompts: Prompts
) -> None:
    config = make_config(write_prompts(["w1 w2", "w3"]))
    create_run(open_store(config.output), config)
    result = attnstore("run", config_file, "--set", "capture.sites=[v, z]")
    assert result.exit_code == 2
    assert "capture.sites is frozen" in result.stderr
    assert "['rot_q', 'rot_k', 'v', 'z']" in result.stderr
    assert "['v', 'z']" in result.stderr


def test_a_model_exchanged_under_the_same_path_is_refused(
    make_config: Configs, write_prompts: Prompts, word_model: Path, tmp_path: Path
) -> None:
    from jobs.prepare import find_run
    from store.errors import FrozenFieldChanged

    model = tmp_path / "model"
    shutil.copytree(word_model, model)
    config = make_config(write_prompts(["w1"]), model={"path": str(model)})
    objects = open_store(config.output)
    create_run(objects, config)
    assert find_run(objects, config) is not None
    body = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**body, "rope_theta": 5.0}))
    with pytest.raises(FrozenFieldChanged, match=r"model\.fingerprint is frozen"):
        find_run(objects, config)


def test_a_kuberay_manifest_has_gpu_workers_retries_and_no_credentials(config_file: Path) -> None:
    result = attnstore(
        "manifest", "kuberay", config_file, "--image", "registry/attnstore:1",
        "--secret", "store-credentials", "--backoff-limit", "7",
        "--set", "output=s3://bucket/run", "--set", "prompts.source=s3://bucket/p.jsonl",
        "--set", "engine.tensor_parallel_size=4", "--set", "workers={min: 2, max: 6}",
        "--set", "storage_options={secret_access_key: open-sesame}",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "open-sesame" not in result.stdout
    config_map, job = yaml.safe_load_all(result.stdout)
    (name, text), *_ = config_map["data"].items()
    assert yaml.safe_load(text)["output"] == "s3://bucket/run"
    assert yaml.safe_load(text)["workers"]["num_gpus"] == 4
    spec = job["spec"]
    assert spec["backoffLimit"] == 7
    assert f"attnstore run {CONFIG_FOLDER}/{name}" in spec["entrypoint"]
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"]) == (2, 6)
    pod = group["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "store-credentials"}}]
    assert pod["terminationGracePeriodSeconds"] > 0


def test_a_manifest_for_paths_that_no_pod_has_is_refused(config_file: Path) -> None:
    result = attnstore("manifest", "kuberay", config_file, "--image", "x", "--set", "output=./run")
    assert result.exit_code == 2
    assert "output './run' is relative" in result.stderr


def test_reading_verbs_import_neither_ray_nor_torch(config_file: Path) -> None:
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from jobs.cli import app\n"
        f"CliRunner().invoke(app, ['status', {str(config_file.parent)!r}])\n"
        "heavy = {'ray', 'torch', 'vllm', 'nnsight', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_dry_run_counts_the_rows_that_generation_may_add(config_file: Path) -> None:
    for tokens, rows in ((0, 21), (1, 21), (5, 21 + 4 * 7)):
        result = attnstore("run", config_file, "--dry-run", "--json", "--set", f"generate={tokens}")
        assert json.loads(result.stdout)["tokens"] == rows, result.output


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("heads=[1, 2]", "capture.heads names [2], but"),
        ("heads=[1, 2]", "query heads 0 to 1"),
        ("layers=[0, 99]", "capture.layers names [99], but"),
        ("layers=[0, 99]", "layers 0 to 0"),
        *[(f"{key}=[]", f"capture.{key}: ") for key in ("layers", "heads")],
        *[(f"{key}=[-1]", f"capture.{key}.0: ") for key in ("layers", "heads")],
        *[(f"{key}=[0, 0]", f"{key} are listed twice") for key in ("layers", "heads")],
    ],
)
def test_layers_and_heads_that_the_model_has_not_are_refused_before_anything_is_written(
    config_file: Path, tmp_path: Path, chosen: str, message: str
) -> None:
    for more in (["--dry-run"], []):
        result = attnstore("run", config_file, *more, "--set", f"capture.{chosen}")
        assert result.exit_code == 2, result.output
        assert message in result.stderr
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_dry_run_counts_the_kept_heads_alone(config_file: Path) -> None:
    sizes = []
    for heads in ("null", "[1]"):
        change = f"capture.heads={heads}"
        result = attnstore("run", config_file, "--dry-run", "--json", "--set", change)
        sizes.append(json.loads(result.stdout)["raw_bytes_per_site"]["z"])
    assert 0.4 < sizes[1] / sizes[0] < 0.55


def test_what_is_printed_for_people_has_no_blanks_behind_it(
    config_file: Path, tmp_path: Path
) -> None:
    estimate = attnstore("run", config_file, "--dry-run")
    config = load_config(config_file)
    create_run(open_store(config.output), config)
    status = attnstore("status", config.output)
    for result in (estimate, status):
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert [line.rstrip() for line in lines] == lines
    assert f"run      {config.output}\n" in status.stdout
    assert "prompts  0 of 8 stored, 0 failed, 0 skipped\n" in status.stdout


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({"kv_lora_rank": 512}, {}, "multi-head latent attention (kv_lora_rank 512)"),
        ({"model_type": "mamba"}, {}, "linear or state-space layers"),
        ({"layer_types": ["mamba"]}, {}, "none of its layers has attention (mamba)"),
        ({"model_type": "bert"}, {}, "encoder-only"),
        ({"is_encoder_decoder": True}, {}, "cross-attention"),
        ({}, {"enable_prefix_caching": True}, "engine.options.enable_prefix_caching is True"),
    ],
)
def test_what_cannot_be_captured_is_refused_before_anything_is_written(
    make_config: Configs, write_prompts: Prompts, word_model: Path, tmp_path: Path,
    model: dict, options: dict, message: str,
) -> None:  # fmt: skip
    folder = tmp_path / "model"
    shutil.copytree(word_model, folder)
    body = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**body, **model}))
    config = make_config(
        write_prompts(["w1"]), model={"path": str(folder)}, engine={"options": options}
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    for more in ([], ["--dry-run"]):
        result = attnstore("run", path, *more)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_dry_run_says_what_the_largest_unit_takes(
    config_file: Path, write_prompts: Prompts
) -> None:
    source = write_prompts([" ".join(["w1"] * 60)] * 40, "long.jsonl")
    changes = [
        f"prompts.source={source}", "capture.pattern=stored", "capture.pattern_dtype=float32",
        "engine.buffer_bytes=1048576",
    ]  # fmt: skip
    arguments = [part for change in changes for part in ("--set", change)]
    one = 60 * 12 * 8 * 4 + 60 * 61 // 2 * 2 * 4
    for tokens, prompts, beyond in (("null", 6, False), ("2400", 40, True)):
        size = ["--set", f"capture.unit_tokens={tokens}"]
        result = attnstore("run", config_file, "--dry-run", "--json", *arguments, *size)
        assert json.loads(result.stdout)["largest_unit_bytes"] == prompts * one, result.output
        result = attnstore("run", config_file, "--dry-run", *arguments, *size)
        assert "largest unit" in result.stdout
        assert ("more than engine.buffer_bytes: 1.05 MB" in result.stdout) is beyond


def test_status_shows_what_the_newest_self_check_measured(
    make_config: Configs, write_prompts: Prompts
) -> None:
    config = make_config(write_prompts(["w1 w2"]))
    objects = open_store(config.output)
    run_id = create_run(objects, config).manifest.run_id
    for day, batched in ((1, 2e-6), (2, 3e-7)):
        figures = SelfCheckFigures(
            run_id=run_id, created=f"2026-01-0{day}", tensor_parallel_size=day, prompts=4,
            tokens=9, batched=batched, batched_at="here", mixed=None, tolerance=1e-3,
            reference=None, reference_at="not a local folder",
        )  # fmt: skip
        objects.create(self_check_key(day, {}), figures.to_bytes())
    printed = attnstore("status", config.output).stdout
    assert "check    4 prompts differ by at most: alone or in a batch 3e-07\n" in printed
    assert "2e-06" not in printed
    body = json.loads(attnstore("status", config.output, "--json").stdout)
    assert [one["batched"] for one in body["checks"]] == [2e-6, 3e-7]


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "RUN", "--limit", "-1"],
        ["status", "RUN", "--watch", "--every", "-1"],
        ["status", "RUN", "--watch", "--every", "inf"],
        ["status", "RUN", "--watch", "--every", "nan"],
        ["run", "CONFIG", "--dry-run", "--tokens-per-second", "nan"],
        ["run", "CONFIG", "--dry-run", "--tokens-per-second", "-1"],
        ["run", "CONFIG", "--dry-run", "--store-gb-per-second", "-1"],
        ["run", "CONFIG", "--dry-run", "--dollars-per-tb-month", "-1"],
        ["manifest", "kuberay", "CONFIG", "--image", "x", "--cpus", "0"],
        ["manifest", "kuberay", "CONFIG", "--image", "x", "--gpus", "-1"],
        ["manifest", "kuberay", "CONFIG", "--image", "x", "--backoff-limit", "-1"],
    ],
)
def test_numbers_out_of_range_are_refused(
    config_file: Path, make_config: Configs, write_prompts: Prompts, arguments: list[str]
) -> None:
    config = make_config(write_prompts(["w1 w2"]))
    create_run(open_store(config.output), config)
    named = {"RUN": config.output, "CONFIG": str(config_file)}
    result = attnstore(*[named.get(argument, argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert "Invalid" in result.stderr


def test_a_dry_run_says_where_generation_has_no_room(config_file: Path) -> None:
    told = "7 prompts have no room for generate.tokens within max_model_len"
    for tokens, there in ((600, True), (2, False)):
        result = attnstore("run", config_file, "--dry-run", "--set", f"generate={tokens}")
        assert result.exit_code == 0, result.output
        assert (told in result.stdout) is there


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"id": "a", "text": "w1"}, {"id": "a", "text": "w2"}], "repeats 'a' (prompts 0 and 1)"),
        ([], "holds no prompts"),
    ],
)
def test_a_source_that_cannot_be_planned_is_refused_by_a_dry_run_too(
    make_config: Configs, write_prompts: Prompts, tmp_path: Path, records: list, message: str
) -> None:
    config = make_config(write_prompts(records))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    for more in (["--dry-run"], []):
        result = attnstore("run", path, *more)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
