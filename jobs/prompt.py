"""Source records into prompts: ids, token ids, token strings, and the reason where one cannot run.

Each text is tokenized exactly once, here; nothing later tokenizes again, so the stored ids are the
ids that ran. A record that cannot be a prompt keeps its place and says why, also where its id or
one of its metadata cannot be written: that alone is left out. Knows no units, no run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from capture.token_text import token_string
from jobs.config import PromptsConfig, SpecialTokens, TooLong
from jobs.errors import SourceError
from jobs.nesting import MAX_NESTING, is_too_nested
from jobs.sources import SourceRecord

BATCH_RECORDS = 512
SKIPPED = "skipped: listed in prompts.skip"
TOO_NESTED = f"is nested more than {MAX_NESTING} deep"
NOT_UNICODE = "holds half a surrogate pair, which is no Unicode text"
ORIGINAL_TOKENS = "tokens_before_truncation"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One planned prompt. `reason` says why it must not run; its tokens are kept all the same."""

    prompt_id: str
    text: str | None
    token_ids: np.ndarray
    """int32 [num_tokens]"""
    token_strings: tuple[str, ...]
    reason: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def rows(self) -> int:
        """Rows the prompt will put on the token axis."""
        return 0 if self.reason is not None else self.num_tokens


@dataclass(frozen=True, slots=True)
class _Draft:
    prompt_id: str
    text: str | None
    token_ids: Sequence[int] | None
    reason: str | None
    metadata: Mapping[str, Any]
    templated: bool = False


class Prompter:
    """Turns records into prompts with one tokenizer (transformers' interface) and one policy."""

    def __init__(
        self,
        config: PromptsConfig,
        tokenizer: Any,
        max_model_len: int,
        vocabulary_size: int | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._longest = max_model_len - 1
        self._vocabulary_size = vocabulary_size
        self._skip = frozenset(config.skip)
        self._strings: dict[int, str] = {}

    def prompts(self, records: Iterable[SourceRecord], first_place: int = 0) -> Iterator[Prompt]:
        """Yield one prompt a record, in order, numbered from `first_place` in the run."""
        stream = enumerate(self._checked(islice(records, self._config.limit)), start=first_place)
        while batch := list(islice(stream, BATCH_RECORDS)):
            yield from self._tokenized([self._draft(place, record) for place, record in batch])

    def _checked(self, records: Iterator[SourceRecord]) -> Iterator[SourceRecord]:
        """Refuse a source whose first record lacks the column: then they all will."""
        config = self._config
        content = config.token_ids_column or config.messages_column or config.text_column
        for number, record in enumerate(records):
            if number == 0 and content not in record.row:
                names = [_writable(str(name)) for name in record.row]
                near = difflib.get_close_matches(content, names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise SourceError(
                    f"{record.where} has no column {content!r} (it has: {', '.join(names)}){hint}"
                )
            yield record

    def _draft(self, place: int, record: SourceRecord) -> _Draft:
        config, row = self._config, record.row
        given = row.get(config.id_column) if config.id_column else None
        prompt_id, fault = _prompt_id(given, place)
        used = {
            config.id_column,
            config.text_column,
            config.token_ids_column,
            config.messages_column,
        }
        metadata: dict[str, Any] = {}
        for key, value in ((str(key), value) for key, value in row.items() if key not in used):
            if not _is_unicode(key):
                fault = fault or f"the name of its column {key!r} {NOT_UNICODE}"
            elif not _is_unicode(value):
                fault = fault or f"its {key!r} {NOT_UNICODE}"
            elif is_too_nested(value):
                fault = fault or f"its {key!r} {TOO_NESTED}"
            else:
                metadata[key] = value
        text = row.get(config.text_column)
        reason = SKIPPED if prompt_id in self._skip else fault
        ids: Sequence[int] | None = None
        templated = False
        if config.token_ids_column is not None:
            ids, reason = self._given_ids(row.get(config.token_ids_column), reason)
        elif config.messages_column is not None:
            text, refusal = self._chat(row.get(config.messages_column))
            reason, templated = reason or refusal, True
        elif not isinstance(text, str):
            kind = "missing" if text is None else f"of type {type(text).__name__}, not a string"
            reason = reason or f"its text is {kind}"
        if not _is_unicode(text):
            text, reason = None, reason or f"its text {NOT_UNICODE}"
        return _Draft(
            prompt_id, text if isinstance(text, str) else None, ids, reason, metadata, templated
        )

    def _given_ids(self, value: Any, reason: str | None) -> tuple[Sequence[int], str | None]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            return (), reason or f"its token ids are of type {type(value).__name__}, not a list"
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            return (), reason or "its token ids are not all integers"
        wrong = next((v for v in value if not 0 <= v < (self._vocabulary_size or 1 << 31)), None)
        if wrong is not None:
            return (), reason or (
                f"token id {wrong} lies outside the model's vocabulary of {self._vocabulary_size}"
            )
        return value, reason

    def _chat(self, messages: Any) -> tuple[str | None, str | None]:
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            return None, "its chat messages are not a list of messages"
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=self._config.add_generation_prompt,
            )
        except Exception as error:  # noqa: BLE001 - a template is a program of the model's author
            told = _writable(str(error))
            return None, f"the chat template refused it: {type(error).__name__}: {told}"
        return str(text), None

    def _tokenized(self, drafts: list[_Draft]) -> Iterator[Prompt]:
        ids_of: dict[int, Sequence[int]] = {}
        for templated in (False, True):
            places = [
                place
                for place, draft in enumerate(drafts)
                if draft.token_ids is None and draft.text and draft.templated is templated
            ]
            if not places:
                continue
            special = self._config.special_tokens is SpecialTokens.MODEL and not templated
            texts = [drafts[place].text for place in places]
            encoded = self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
            ids_of |= dict(zip(places, encoded, strict=True))
        for place, draft in enumerate(drafts):
            ids = draft.token_ids if draft.token_ids is not None else ids_of.get(place, ())
            yield self._finished(draft, np.asarray(ids, dtype=np.int32))

    def _finished(self, draft: _Draft, ids: np.ndarray) -> Prompt:
        reason, metadata = draft.reason, draft.metadata
        truncate = self._config.too_long is TooLong.TRUNCATE
        if truncate:
            metadata = {**metadata, ORIGINAL_TOKENS: len(ids)}
            ids = ids[: self._longest]
        if reason is None and len(ids) == 0:
            reason = "it is empty: no tokens to capture"
        if reason is None and len(ids) > self._longest:
            reason = (
                f"too long: {len(ids)} tokens, the engine takes {self._longest} "
                f"(max_model_len {self._longest + 1} less one for the token it generates)"
            )
        strings = tuple(self._string(int(token)) for token in ids)
        return Prompt(draft.prompt_id, draft.text, ids, strings, reason, metadata)

    def _string(self, token: int) -> str:
        """One token as a reader may see it: its own text, or its name where it has none alone."""
        known = self._strings.get(token)
        if known is not None:
            return known
        text = token_string(self._tokenizer, token)
        return self._strings.setdefault(token, text)


def _prompt_id(given: Any, place: int) -> tuple[str, str | None]:
    """Return a record's id, and why it cannot be used where it cannot.

    The id in its stead has the place before it: with two such records, or a record that has by
    chance what stands for the broken one, ids stay unique.
    """
    if given is None or given == "":
        return f"p{place}", None
    if is_too_nested(given):
        return f"p{place}:nested", f"its id {TOO_NESTED}"
    prompt_id = str(given)
    if _is_unicode(prompt_id):
        return prompt_id, None
    return f"p{place}:{_writable(prompt_id)}", f"its id {NOT_UNICODE}"


def _writable(text: str) -> str:
    """A text with its halves of surrogate pairs spelled out, such as `\\ud800`."""
    return text.encode("utf-8", "backslashreplace").decode()


def _is_unicode(value: Any) -> bool:
    """Whether a value, where it is a string, can be written as UTF-8."""
    if not isinstance(value, str) or value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def load_tokenizer(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """Return the model's tokenizer. Raises `SourceError` where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise SourceError(f"no tokenizer at {path!r} ({error}); set model.tokenizer") from error
