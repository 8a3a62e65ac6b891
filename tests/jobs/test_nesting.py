"""Values nested thousands deep, from sources and configs: one bad prompt or a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.config import ModelConfig, PromptsConfig
from jobs.config_file import load_config, parse_config
from jobs.errors import ConfigError, SourceError
from jobs.model_identity import _text_configs
from jobs.nesting import MAX_NESTING, is_too_nested
from jobs.plan import prompt_table
from jobs.prompt import Prompter
from jobs.sources import PromptSource, SourceRecord
from store.errors import DamagedObject
from store.objects.local import LocalStore
from store.weights import OutputProjection, read_output_projection, weight_key
from store.weights import write_output_projection as write
from tests.jobs.test_prompt_text import LetterTokenizer

DEEP = "[" * 50_000 + "]" * 50_000


def nested(depth: int, kind: type = list) -> Any:
    value: Any = kind()
    for _ in range(depth - 1):
        value = {"a": value} if kind is dict else kind([value])
    return value


@pytest.mark.parametrize("kind", [list, dict, tuple])
def test_the_bound_is_exact(kind: type) -> None:
    assert not is_too_nested(nested(MAX_NESTING, kind))
    assert is_too_nested(nested(MAX_NESTING + 1, kind))
    assert is_too_nested(nested(100_000, kind))
    assert not is_too_nested(["a", 1, None, {"a": ("b",)}])
    assert not is_too_nested("a" * 1000)


def test_what_holds_itself_or_much_of_one_thing_ends() -> None:
    itself: list[Any] = []
    itself.append(itself)
    assert is_too_nested(itself)
    many: list[Any] = []
    for _ in range(MAX_NESTING - 1):
        many = [many] * 9
    assert not is_too_nested(many)


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("p.jsonl", f'{{"text": "a"}}\n{{"x": {DEEP}}}\n', r"p\.jsonl, line 2: not readable"),
        ("p.json", f'[{{"x": {DEEP}}}]', "cannot read .*p.json as json"),
    ],
)
def test_a_source_that_json_cannot_read_is_refused(
    tmp_path: Path, name: str, data: str, why: str
) -> None:
    (tmp_path / name).write_text(data)
    config = PromptsConfig(source=str(tmp_path / name))
    with pytest.raises(SourceError, match=why):
        list(PromptSource(config).records())


@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 400, 50_000])
@pytest.mark.parametrize(
    ("column", "why"),
    [
        ("kind", "its 'kind' is nested more than 100 deep"),
        ("id", "its id is nested more than 100 deep"),
        ("text", "its text is of type list, not a string"),
        ("token_ids", "its token ids are not all integers"),
    ],
)
def test_a_nested_value_fails_its_prompt_alone(depth: int, column: str, why: str) -> None:
    check(column, nested(depth), why)


def test_chat_messages_nested_too_deep_for_their_template_fail_alone() -> None:
    check("messages", [nested(50_000)], "the chat template refused it: RecursionError")


def check(column: str, value: Any, why: str) -> None:
    named = {f"{column}_column": column} if column in ("token_ids", "messages") else {}
    config = PromptsConfig.model_validate({"source": "p.jsonl", **named})
    rows = [
        {"text": "a", "token_ids": [1], "messages": ["x"], column: value},
        {"text": "b", "token_ids": [1], "messages": ["x"]},
    ]
    records = [SourceRecord(row, f"p.jsonl, line {n}") for n, row in enumerate(rows)]
    bad, fine = Prompter(config, ChatTokenizer(), 64).prompts(records)
    assert bad.reason is not None
    assert bad.reason.startswith(why)
    assert fine.reason is None
    assert prompt_table([bad, fine]).num_rows == 2


class ChatTokenizer(LetterTokenizer):
    """Its chat template is every message as Python writes it."""

    def apply_chat_template(self, messages: list[Any], **_options: Any) -> str:
        return "".join(map(repr, messages))


def test_a_nested_config_is_refused(tmp_path: Path) -> None:
    body = {"output": "o", "model": "m", "prompts": "p.jsonl"}
    for deep in (nested(MAX_NESTING + 1), nested(50_000), nested(50_000, dict)):
        with pytest.raises(ConfigError, match="storage_options is nested more than 100 deep"):
            parse_config({**body, "storage_options": {"a": deep}})
    (tmp_path / "c.yaml").write_text(json.dumps(body))
    with pytest.raises(ConfigError, match="storage_options is nested"):
        load_config(tmp_path / "c.yaml", ["storage_options" + ".a" * 5000 + "=1"])
    for text in (
        f"output: {DEEP[49_400:50_600]}",
        "output: &a [*a]",
        "storage_options: {a: &a [*a]}",
    ):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"not readable as YAML|nested"):
            load_config(tmp_path / "c.yaml")


def test_documents_that_are_nested_deep_are_unreadable(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(ConfigError, match=r"config\.json is not readable as JSON"):
        _text_configs(ModelConfig(path=str(tmp_path)))
    objects = LocalStore(tmp_path)
    write(objects, OutputProjection(0, np.ones((1, 2, 3), np.float32)), "a" * 16)
    text = DEEP[25_000:75_000].encode()
    objects.put(weight_key(0), [len(text).to_bytes(8, "little"), text])
    with pytest.raises(DamagedObject, match="not readable"):
        read_output_projection(objects, 0, None)
