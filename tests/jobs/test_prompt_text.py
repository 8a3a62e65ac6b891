"""Text that is no Unicode: JSON can spell half a surrogate pair, which no file can hold."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.config import PromptsConfig
from jobs.errors import SourceError
from jobs.plan import prompt_table
from jobs.prompt import Prompter
from jobs.sources import SourceRecord


class LetterTokenizer:
    """One token a letter; refuses what a Rust tokenizer refuses."""

    def __call__(self, texts: list[str], **_options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)

    def decode(self, tokens: Any, **_options: Any) -> str:
        return "".join(map(chr, tokens if isinstance(tokens, list) else [tokens]))


def prompts_of(row: dict[str, Any]) -> list[Any]:
    prompter = Prompter(PromptsConfig(source="p.jsonl"), LetterTokenizer(), 64)
    records = [SourceRecord(row, "p.jsonl, line 1"), SourceRecord({"text": "b"}, "p.jsonl, line 2")]
    return list(prompter.prompts(records))


def test_a_text_that_is_no_unicode_fails_alone() -> None:
    broken, fine = prompts_of({"text": "a\ud800b"})
    assert broken.text is None
    assert "half a surrogate pair" in broken.reason
    assert (fine.reason, fine.num_tokens) == (None, 1)


@pytest.mark.parametrize(
    ("broken", "prompt_id", "reason"),
    [
        ({"id": "a\ud800"}, r"p0:a\ud800", "its id holds half a surrogate pair"),
        ({"id": "x", "note": "\ud800"}, "x", "its 'note' holds half a surrogate pair"),
        ({"id": "x", "\ud800": 1}, "x", r"the name of its column '\ud800' holds half a surrogate"),
    ],
)
def test_an_id_or_metadata_that_is_no_unicode_fails_its_prompt_alone(
    broken: dict[str, Any], prompt_id: str, reason: str
) -> None:
    bad, fine = prompts_of({"text": "a", "kind": "k", **broken})
    assert bad.prompt_id == prompt_id
    assert bad.reason.startswith(reason)
    assert bad.metadata == {"kind": "k"}
    assert (fine.prompt_id, fine.reason, fine.num_tokens) == ("p1", None, 1)
    table = prompt_table([bad, fine])
    assert table["prompt_id"].to_pylist() == [prompt_id, "p1"]
    assert table["kind"].to_pylist() == ["k", None]


def test_ids_that_are_no_unicode_stay_unique() -> None:
    rows = [{"id": "\ud800", "text": "a"}, {"id": "\ud800", "text": "a"}, {"id": "p0", "text": "a"}]
    prompter = Prompter(PromptsConfig(source="p.jsonl"), LetterTokenizer(), 64)
    records = [SourceRecord(row, "here") for row in rows]
    ids = [prompt.prompt_id for prompt in prompter.prompts(records)]
    assert ids == [r"p0:\ud800", r"p1:\ud800", "p0"]


def test_what_a_chat_template_says_of_broken_text_can_be_kept() -> None:
    class Refusing(LetterTokenizer):
        def apply_chat_template(self, messages: Any, **_options: Any) -> str:
            raise ValueError(f"no role {messages[0]['role']}")

    prompter = Prompter(PromptsConfig(source="p", messages_column="chat"), Refusing(), 64)
    record = SourceRecord({"chat": [{"role": "\udfff", "content": "a"}]}, "p, line 1")
    (prompt,) = prompter.prompts([record])
    assert prompt.reason is not None
    assert prompt.reason.endswith(r"no role \udfff")
    assert prompt_table([prompt]).num_rows == 1


def test_a_missing_column_is_told_beside_names_that_are_no_unicode() -> None:
    prompter = Prompter(PromptsConfig(source="p"), LetterTokenizer(), 64)
    with pytest.raises(SourceError) as caught:
        list(prompter.prompts([SourceRecord({"txt": "a", "\ud800": 1}, "p, line 1")]))
    assert r"(it has: txt, \ud800)" in str(caught.value)
