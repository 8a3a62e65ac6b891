"""Chunks in the wrong place raise on every back end, even in a read of one chunk of a shard."""

from __future__ import annotations

import numpy as np
import pytest

from store import keys
from store.array_reader import ReadOptions
from store.checksum import crc32c
from store.codec import Codec
from store.commit import commit_unit, read_commit
from store.errors import CommitRefused, DamagedObject
from store.objects.obstore_store import ObstoreStore
from store.objects.protocol import ObjectStore
from store.run import Run
from store.shard_index import chunk_offsets
from store.verify import verify_run
from tests.store.sample_run import (
    SampleShape,
    SampleUnit,
    capture,
    sample_units,
    write_manifests,
    write_unit,
)

LENGTHS = [[900], [900]]
SHAPE = SampleShape(max_shard_bytes=256 << 10)
ONE_ROW = {"layer": 0, "pos": slice(700, 701)}

EXCHANGED = {
    "layers": ("data/00000000/a0/z/c/0/0/0/0", "data/00000000/a0/z/c/1/0/0/0"),
    "sites": ("data/00000000/a0/z/c/0/0/0/0", "data/00000000/a0/rot_q/c/0/0/0/0"),
    "units": ("data/00000000/a0/z/c/0/0/0/0", "data/00000001/a0/z/c/0/0/0/0"),
    "attempts": ("data/00000000/a0/z/c/0/0/0/0", "data/00000000/a1/z/c/0/0/0/0"),
}


def alike(codec: Codec) -> tuple[SampleShape, list[SampleUnit]]:
    """Return units whose arrays all hold the same values, so that only tags tell them apart."""
    shape = SampleShape(max_shard_bytes=256 << 10, codec=codec)
    units = sample_units(shape, LENGTHS)
    for unit in units:
        for site, values in unit.arrays.items():
            values[:] = np.random.default_rng(1).standard_normal(values[0].shape)
            unit.arrays[site] = values
    return shape, units


def write(objects: ObjectStore, shape: SampleShape, units: list[SampleUnit]) -> None:
    write_manifests(objects, shape, LENGTHS)
    for unit in units:
        capture(objects, shape, unit)
    assert len(list(objects.list("data/00000000/a0/z/c/0/"))) == 1


def whole(objects: ObjectStore, name: str) -> bytes:
    return objects.get(name, max_bytes=1 << 30)


def exchange(objects: ObjectStore, one: str, other: str) -> None:
    first, second = whole(objects, one), whole(objects, other)
    assert len(first) == len(second)
    objects.put(one, [second])
    objects.put(other, [first])


@pytest.mark.parametrize("pair", EXCHANGED)
def test_an_exchanged_shard_is_found_in_a_read_of_one_row(objects, pair):
    units = sample_units(SHAPE, LENGTHS)
    write(objects, SHAPE, units)
    write_unit(objects, SHAPE, sample_units(SHAPE, LENGTHS, seed=8)[0], "a1")
    read = Run(objects, ReadOptions()).read("z", prompt="p0", **ONE_ROW)
    assert np.array_equal(read.values[:, 0], units[0].arrays["z"][0, 700])
    exchange(objects, *EXCHANGED[pair])
    with pytest.raises(DamagedObject, match=r"another chunk's or another shard's"):
        Run(objects, ReadOptions()).read("z", prompt="p0", **ONE_ROW)
    assert EXCHANGED[pair][0] in {one.name for one in verify_run(objects, deep=True).problems}


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("pair", EXCHANGED)
def test_shards_of_equal_values_are_told_apart(pair, codec):
    objects = ObstoreStore(f"memory://alike-{pair}-{codec}")
    shape, units = alike(codec)
    write(objects, shape, units)
    write_unit(objects, shape, units[0], "a1")
    exchange(objects, *EXCHANGED[pair])
    with pytest.raises(DamagedObject, match=r"another chunk's or another shard's"):
        Run(objects, ReadOptions()).read("z", prompt="p0", **ONE_ROW)
    problems = verify_run(objects, deep=True).problems
    assert EXCHANGED[pair][0] in {one.name for one in problems}


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("with_tags", [True, False])
def test_chunks_exchanged_inside_a_shard_are_found(codec, with_tags):
    objects = ObstoreStore(f"memory://inside-{codec}-{with_tags}")
    shape, units = alike(codec)
    for unit in units:
        for values in unit.arrays.values():
            values[:, 512:768] = values[:, :256]
    write(objects, shape, units)
    name = "z/c/0/0/0/0"
    commit = read_commit(objects, keys.commit_key(0))
    (array,) = [one for one in commit.arrays if one.site == "z"]
    cut = array.geometry()
    offsets = chunk_offsets(cut, array.stored_sizes(cut, 0, name)).tolist()
    data = bytearray(whole(objects, f"data/00000000/a0/{name}"))
    size = offsets[1] - (0 if with_tags else 4)
    assert size <= offsets[3] - offsets[2]
    first, third = data[:size], data[offsets[2] : offsets[2] + size]
    data[:size], data[offsets[2] : offsets[2] + size] = third, first
    objects.put(f"data/00000000/a0/{name}", [bytes(data)])
    run = Run(objects, ReadOptions())
    if with_tags:
        for pos in (0, 700):
            with pytest.raises(DamagedObject, match=r"another chunk's or another shard's"):
                run.read("z", prompt="p0", layer=0, pos=pos)
        assert not verify_run(objects, deep=True).ok
    else:
        # Equal values under their own tags: nothing has changed.
        assert verify_run(objects, deep=True).ok


def test_a_tag_is_what_the_format_page_says():
    objects = ObstoreStore("memory://spelled-out")
    write(objects, SHAPE, sample_units(SHAPE, LENGTHS))
    name = "data/00000000/a0/z/c/1/0/0/0"
    data = whole(objects, name)
    stride = 4 * 256 * 16 * 4 + 8
    for number in range(4):
        values, ending = data[number * stride :][: stride - 8], data[: (number + 1) * stride][-8:]
        assert ending[:4] == crc32c(values).to_bytes(4, "little")
        spelled = name.encode() + number.to_bytes(4, "little") + ending[:4]
        assert ending[4:] == crc32c(spelled).to_bytes(4, "little")


def test_a_commit_that_denies_the_tags_is_refused():
    objects = ObstoreStore("memory://denied")
    write_manifests(objects, SHAPE, LENGTHS)
    commit = write_unit(objects, SHAPE, sample_units(SHAPE, LENGTHS)[0], "a0")
    arrays = [array.model_copy(update={"tags": False}) for array in commit.arrays]
    with pytest.raises(CommitRefused, match="where its chunks take"):
        commit_unit(objects, commit.model_copy(update={"arrays": arrays}))


def test_a_shard_is_put_under_the_name_it_was_encoded_for():
    from store.attempt import AttemptWriter
    from store.shard import encode_shard

    geometry = SHAPE.geometry("z", 10)
    values = np.zeros((4, 10, 16), np.float32)
    writer = AttemptWriter(ObstoreStore("memory://named"), 3, "a0")
    encoded = encode_shard(geometry, 0, values, Codec.RAW, writer.shard_key("z", (0, 0, 0, 0)))
    assert writer.put_shard(encoded).name == "z/c/0/0/0/0"
    other = AttemptWriter(ObstoreStore("memory://named"), 3, "a1")
    with pytest.raises(ValueError, match="does not belong"):
        other.put_shard(encoded)
