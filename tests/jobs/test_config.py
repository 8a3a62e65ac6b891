"""The config: what it accepts, how it refuses, and what is frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from capture.settings import CaptureSettings
from jobs.config import RunConfig, SpecialTokens
from jobs.config_file import load_config, parse_config
from jobs.config_yaml import read_yaml
from jobs.errors import ConfigError
from store.run_format import Site

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

BODY = """
output: ./some-run
prompts: {source: prompts.jsonl}
model: {path: some/model, dtype: float32}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_defaults_and_paths_are_kept_as_given(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, BODY))
    assert config.model.path == "some/model"
    assert config.stored()["model"]["path"] == "some/model"
    assert config.capture.sites == (Site.ROT_Q, Site.ROT_K, Site.V, Site.Z)
    assert Path(config.location().url).is_absolute()


def test_a_model_folder_reaches_the_engine_as_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    body = {"output": "x", "prompts": {"source": "p"}}
    settings = parse_config({**body, "model": "models/tiny"}).engine_settings()
    assert settings.model == str(tmp_path / "models" / "tiny")
    assert parse_config({**body, "model": "org/name"}).engine_settings().model == "org/name"


def test_a_short_section_may_be_set_deeper(tmp_path: Path) -> None:
    text = "output: x\nprompts: {source: p}\nmodel: m\ngenerate: 8\n"
    overrides = ["model.dtype=float32", "generate.top_k=5"]
    config = load_config(written(tmp_path, text), overrides)
    assert (config.model.path, config.model.dtype) == ("m", "float32")
    assert (config.generate.tokens, config.generate.top_k) == (8, 5)


def test_a_model_may_be_named_alone() -> None:
    config = parse_config({"output": "x", "prompts": {"source": "p"}, "model": "some/model"})
    assert config.model.path == "some/model"


def test_set_overrides_in_order_and_reads_yaml_values(tmp_path: Path) -> None:
    overrides = [
        "workers.count=4",
        "capture.layers=[0, 2]",
        "workers.count=2",
        "prompts.special_tokens=none",
    ]
    config = load_config(written(tmp_path, BODY), overrides)
    assert config.workers.count == 2
    assert config.capture.layers == (0, 2)
    assert config.prompts.special_tokens is SpecialTokens.NONE


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        (BODY + "promts: 1\n", None, "promts: no such key; did you mean 'prompts'?"),
        (BODY, "prompts.text_colum=a", "did you mean 'text_column'?"),
        (BODY, "workers.count=0", "workers.count"),
        (BODY, "capture.sites=[rot_q, nothing]", "capture.sites.1"),
        (BODY, "capture.sites=[v, v]", "listed twice"),
        (BODY, "model.dtype=int8", "int8"),
        (BODY, "workers={min: 3, max: 2}", "exceeds"),
        (BODY, "workers.count", "not key=value"),
        (BODY, "output.deeper=1", "has no keys inside"),
        (BODY + "output: y\n", None, "the key 'output' is given twice"),
        (BODY + "workers: {count: 1, 'count': 2}\n", None, "the key 'count' is given twice"),
        (BODY + "engine:\n  options:\n    - {a: 1, a: 2}\n", None, "the key 'a' is given twice"),
        (BODY, "workers={count: 1, count: 2}", "the key 'count' is given twice"),
        (BODY, "output=2024-02-45", "not readable as YAML"),
        (BODY, f"workers.count={'9' * 5000}", "not readable as YAML"),
        (BODY, f"prompts.skip={'[' * 5000}", "not readable as YAML"),
        ("output: [", None, "not readable as YAML"),
        ("- a\n", None, "must be a mapping"),
        ("output: x\n", None, "model: must be set"),
    ],
)
def test_a_wrong_config_says_what_and_where(
    tmp_path: Path, text: str, override: str | None, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text), [override] if override else [])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5:2", "5:2"),
        ("0:16", "0:16"),
        ("1:30.5", "1:30.5"),
        ("[5:2, 7, -1.5]", ["5:2", 7, -1.5]),
        ("010", "010"),
        ("0x10", 16),
        ("1_000", 1000),
        ("-0.5e-3", -0.0005),
        (".inf", float("inf")),
        ("{a: &one {x: 1}, b: {<<: *one, x: 2}}", {"a": {"x": 1}, "b": {"x": 2}}),
    ],
)
def test_yaml_has_no_numbers_in_base_60_or_8(text: str, value: object) -> None:
    assert read_yaml(text) == value


@given(st.text("0123456789_:.eEobx+-", max_size=8))
@example("-.0")
@example("+.5e-3")
def test_what_yaml_is_written_for_a_text_is_read_as_that_text(text: str) -> None:
    assert read_yaml(yaml.safe_dump({"key": text})) == {"key": text}


@pytest.mark.parametrize("positions", ["5:2", "0:16", "-8:", ":-1", "1:59"])
def test_positions_need_no_quotes(tmp_path: Path, positions: str) -> None:
    path = written(tmp_path, BODY)
    overrides = ["capture.sites=[z]", f"capture.positions={positions}"]
    assert load_config(path, overrides).capture.positions == positions


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_credentials_are_never_stored() -> None:
    config = parse_config(
        {
            "output": "s3://bucket/run",
            "prompts": {
                "source": "https://me:open-sesame@host/p.jsonl?signature=open-sesame",
                "options": {"secret": "open-sesame"},
            },
            "model": "m",
            "engine": {"options": {"hf_token": "open-sesame", "block_size": 32}},
            "storage_options": {"secret_access_key": "open-sesame"},
        }
    )
    stored = config.stored()
    assert "open-sesame" not in str(stored)
    assert "open-sesame" not in str(config.frozen_fields())
    assert stored["prompts"]["source"] == "https://host/p.jsonl"
    assert stored["engine"]["options"] == {"block_size": 32}
    assert config.location().options["secret_access_key"] == "open-sesame"


def test_frozen_fields_are_those_the_data_depends_on() -> None:
    config = parse_config({"output": "x", "prompts": {"source": "p"}, "model": "m"})
    frozen = config.frozen_fields()
    assert frozen["model.path"] == "m"
    assert frozen["capture.sites"] == ["rot_q", "rot_k", "v", "z"]
    assert {"model.revision", "model.dtype", "capture.codec", "capture.layers"} <= set(frozen)
    assert {name for name in frozen if name.startswith("engine.")} == {
        "engine.seed", "engine.options",
    }  # fmt: skip
    free = ("workers.", "storage_options", "max_bytes", "output", "prompts.source")
    assert not [name for name in frozen if name.startswith(free)]


def test_a_selection_of_heads_freezes_how_many_ranks_there_are() -> None:
    body = {"output": "x", "prompts": {"source": "p"}, "model": "m"}
    chosen = parse_config({**body, "capture": {"heads": [3, 1]}})
    assert chosen.frozen_fields()["engine.tensor_parallel_size"] == 1
    assert "engine.tensor_parallel_size" not in parse_config(body).frozen_fields()
    assert chosen.capture_settings().heads == (3, 1)
    assert CaptureSettings.from_json(chosen.capture_settings().to_json()).heads == (3, 1)


def test_every_key_has_a_place_in_the_stored_config() -> None:
    config = parse_config({"output": "x", "prompts": {"source": "p"}, "model": "m"})
    assert set(config.stored()) == set(RunConfig.model_fields) - {"storage_options"}


def test_the_config_s_document_has_a_row_for_every_key_and_says_which_are_frozen() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "config.md").read_text()
    frozen = parse_config({"output": "x", "prompts": {"source": "p"}, "model": "m"}).frozen_fields()
    section = ""
    rows: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            section = f"{line[3:]}."
        elif line.startswith("| `"):
            names, _, rest = line[2:].partition(" | ")
            rows |= {section + name.strip("` "): rest for name in names.split(",")}
    keys = set()
    for name, info in RunConfig.model_fields.items():
        inner = getattr(info.annotation, "model_fields", None)
        keys |= {f"{name}.{key}" for key in inner} if inner else {name}
    assert set(rows) == keys
    assert {name for name, row in rows.items() if "| frozen" in row} == set(frozen)


@pytest.mark.parametrize(
    ("text", "start", "stop"),
    [
        ("all", None, None),
        ("last", -1, None),
        ("0:16", 0, 16),
        ("-8:", -8, None),
        (":-1", None, -1),
    ],
)
def test_positions_are_written_as_a_slice(text: str, start: int | None, stop: int | None) -> None:
    body = {"output": "x", "prompts": {"source": "p"}, "model": "m"}
    config = parse_config({**body, "capture": {"sites": ["z"], "positions": text}})
    kept = config.capture_settings().positions
    assert (kept.start, kept.stop) == (start, stop)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"capture": {"sites": ["z"], "positions": "3"}}, "write all, last, or a slice"),
        ({"capture": {"positions": "last"}}, "every position of rot_k"),
        ({"capture": {"sites": ["z"], "positions": "last"}, "generate": 4}, "keep all positions"),
        ({"capture": {"pattern": "stored", "positions": "-8:"}}, "keep all positions"),
        ({"capture": {"pattern": "stored", "sites": ["rot_q", "z"]}}, "add rot_k to sites"),
        ({"capture": {"pattern": "stored", "pattern_dtype": "int4"}}, "pattern_dtype"),
        ({"capture": {"sites": ["pattern", "z"]}}, "set capture.pattern to stored"),
    ],
)
def test_positions_that_cannot_be_kept_are_refused(extra: dict, message: str) -> None:
    body = {"output": "x", "prompts": {"source": "p"}, "model": "m"}
    with pytest.raises(ConfigError, match=message):
        parse_config({**body, **extra})


def test_stored_patterns_reach_the_ranks_with_their_type() -> None:
    body = {"output": "x", "prompts": {"source": "p"}, "model": "m"}
    assert parse_config(body).capture_settings().pattern is None
    stored = parse_config({**body, "capture": {"pattern": "stored"}})
    assert stored.capture_settings().pattern == "float16"
    assert {"capture.pattern", "capture.pattern_dtype"} <= set(stored.frozen_fields())
    small = parse_config({**body, "capture": {"pattern": "stored", "pattern_dtype": "uint8"}})
    assert small.capture_settings().pattern == "uint8"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_config(path: Path) -> None:
    config = load_config(path)
    assert Site.Z in config.capture.sites
    assert config.engine.host_bytes >= 3 * config.engine.slot_bytes
