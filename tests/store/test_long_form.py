"""Slices as long tables."""

from __future__ import annotations

import pytest

from store import long_form as module
from store.long_form import long_form
from store.objects.local import LocalStore
from store.run import open_run
from tests.store.sample_run import SampleShape, write_run


def test_every_value_with_its_labels(tmp_path, monkeypatch) -> None:
    write_run(LocalStore(tmp_path), SampleShape(dtype="bfloat16"), [[5]])
    run = open_run(str(tmp_path))
    z = run.read("z", prompt="p0", layer=1, head=[3, 0], pos=[4, 2])
    table = long_form(z)
    assert table.num_rows == 2 * 2 * 16
    assert set(table.column_names) == {
        "prompt", "layer", "head", "pos", "token", "d_head", "value"
    }  # fmt: skip
    frame = table.to_pandas()
    row = frame[(frame["head"] == 0) & (frame["pos"] == 2)].iloc[7]
    assert (row["token"], row["layer"], row["prompt"], row["d_head"]) == ("t2", 1, "p0", 7)
    assert row["value"] == float(z.sel(head=0, pos=2).values[7])
    pattern = long_form(run.pattern("p0", 0, 0)).to_pandas()
    assert len(pattern) == 25
    assert set(pattern.columns) >= {"query_token", "key_token", "query_pos", "key_pos"}
    monkeypatch.setattr(module, "MAX_VALUES", 10)
    with pytest.raises(ValueError, match="take a slice of at most 10"):
        long_form(z)
