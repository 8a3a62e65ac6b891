"""The mutation script's bugs can still be planted. `make mutations` shows that each is noticed."""

from __future__ import annotations

import ast

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_bug_can_be_planted(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    changed = mutated(source, mutation)
    assert changed != source
    ast.parse(changed)
