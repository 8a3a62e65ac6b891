"""One token as a reader may see it. Knows a tokenizer's public calls only."""

from __future__ import annotations

from typing import Any


def token_string(tokenizer: Any, token: int) -> str:
    """Return the token's own text, or its name where it has none alone (part of a character)."""
    name = tokenizer.convert_ids_to_tokens(token)
    name = "" if name is None else str(name)
    if name.startswith("▁"):
        return name.replace("▁", " ")
    text = str(tokenizer.decode([token]))
    return name if not text or "\N{REPLACEMENT CHARACTER}" in text else text
