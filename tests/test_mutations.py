"""The mutation script's bugs can still be planted. `make mutations` shows that each is noticed."""

from __future__ import annotations

import ast

import pytest

from tests.mutations import MUTATIONS, ROOT, UNNOTICED, Mutation, mutated, read_document


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_bug_can_be_planted(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    changed = mutated(source, mutation)
    assert changed != source
    ast.parse(changed)


def test_the_document_has_each_and_none_that_went_unnoticed() -> None:
    rows = read_document()
    assert list(rows) == [mutation.name for mutation in MUTATIONS]
    assert [name for name, seen in rows.items() if UNNOTICED in (seen.fast, seen.noticed)] == []
    assert [name for name, seen in rows.items() if seen.fast == "not run"] == []
