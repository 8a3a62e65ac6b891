"""Text that is no Unicode: JSON can spell half a surrogate pair, which no file can hold."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.config import PromptsConfig
from jobs.errors import SourceError
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


@pytest.mark.parametrize("column", ["id", "note"])
def test_an_id_or_metadata_that_is_no_unicode_is_named(column: str) -> None:
    with pytest.raises(SourceError, match=r"line 1: its .*half a surrogate pair"):
        prompts_of({"text": "a", column: "\ud800"})
