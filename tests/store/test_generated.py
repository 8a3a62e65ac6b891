"""What a model said comes back as it was written, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from store import keys
from store.attempt import AttemptWriter
from store.errors import DamagedObject
from store.generated import GENERATED, Continuation, generated_bytes, read_generated
from store.objects.open import open_store
from tests.store.sample_run import SampleShape, make_unit, write_unit

SAID = [
    (0, Continuation((5, 1), (" Paris", "<|eos|>"), (-0.5, -2.0), "stop")),
    (2, Continuation((7,), ("é",), (-0.25,), "length")),
]


@pytest.fixture
def written(tmp_path: Path):
    objects = open_store(str(tmp_path / "run"))
    shape = SampleShape()
    commit = write_unit(objects, shape, make_unit(shape, 0, 0, [3, 0, 4], 1), "a0")
    record = AttemptWriter(objects, 0, "a0").put_object(GENERATED, generated_bytes(SAID))
    return objects, commit, commit.model_copy(update={"objects": [*commit.objects, record]})


def test_continuations_come_back_by_place(written) -> None:
    objects, without, commit = written
    assert read_generated(objects, commit) == dict(SAID)
    assert read_generated(objects, without) == {}


def test_a_flipped_byte_is_found(written, tmp_path: Path) -> None:
    objects, _, commit = written
    file = tmp_path / "run" / (keys.attempt_prefix(0, "a0") + GENERATED)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedObject, match="not what was committed"):
        read_generated(objects, commit)


def test_a_missing_table_is_damage_like_any_missing_object(written) -> None:
    objects, _, commit = written
    objects.delete(keys.attempt_prefix(0, "a0") + GENERATED)
    with pytest.raises(DamagedObject, match=r"generated.parquet: a commit lists it"):
        read_generated(objects, commit)
