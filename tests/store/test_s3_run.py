"""A whole run on S3 servers: written, snapshotted, repaired, read back, verified and cleaned."""

from __future__ import annotations

import secrets

import numpy as np
import pytest

from store import open_run
from store.codec import Codec
from store.commit import begin_repair
from store.gc import collect_garbage
from store.objects.open import open_store
from store.snapshot import write_snapshot
from store.verify import verify_run
from tests.store.sample_run import RUN_ID, SampleShape, capture, sample_units, write_run

LENGTHS = [[300, 0, 7], [1, 520]]


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("kind", ["moto", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def test_a_run_from_first_put_to_last_read(kind, codec, request):
    server = request.getfixturevalue(f"{kind}_server")
    url = server.url(f"runs/{secrets.token_hex(4)}")
    objects = open_store(url, server.options)
    shape = SampleShape(codec=codec, dtype="bfloat16", ranks=2)
    write_run(objects, shape, LENGTHS, seed=1)
    write_snapshot(objects, RUN_ID)
    repaired = sample_units(shape, LENGTHS, seed=2)[1]
    assert capture(objects, shape, repaired, "again", repair=begin_repair(objects, 1)).won
    (garbage,) = collect_garbage(objects, delete=True).garbage
    assert garbage.prefix == "data/00000001/a0/"
    assert verify_run(objects, deep=True).problems == []

    run = open_run(url, server.options)
    first = sample_units(shape, LENGTHS, seed=1)[0]
    for prompt, values, rows in (
        ("p0", first, slice(0, 300)),
        ("p2", first, slice(300, 307)),
        ("p4", repaired, slice(1, 521)),
    ):
        for site, truth in values.arrays.items():
            found = np.ascontiguousarray(run.read(site, prompt=prompt).values)
            expected = np.ascontiguousarray(truth[:, rows].swapaxes(1, 2))
            assert found.tobytes() == expected.tobytes(), (prompt, site)
