"""An attempt's metadata: put at once, and an error of any of it is the attempt's."""

from __future__ import annotations

import threading

import pytest

from store.attempt import AttemptWriter
from store.errors import StoreError
from store.objects.local import LocalStore
from tests.store.sample_run import SampleShape, make_unit, write_unit


class MeetingStore(LocalStore):
    """A store in which the puts of metadata go on only when all of them have begun."""

    def __init__(self, root, puts: int, fail: str = "") -> None:
        super().__init__(root)
        self.meeting, self.fail = threading.Barrier(puts), fail

    def put(self, name, parts):
        self.meeting.wait(20)
        if self.fail and name.endswith(self.fail):
            raise StoreError("refused")
        super().put(name, parts)


@pytest.fixture
def arrays(tmp_path):
    shape = SampleShape()
    return write_unit(
        LocalStore(tmp_path / "other"), shape, make_unit(shape, 0, 0, [9], 1), "a"
    ).arrays


def test_metadata_is_put_at_once_and_recorded_in_order(tmp_path, arrays):
    names = ["zarr.json", *(f"{array.site}/zarr.json" for array in arrays)]
    writer = AttemptWriter(MeetingStore(tmp_path, len(names)), 3, "a", run_id="00" * 8)
    assert [record.name for record in writer.put_metadata(arrays)] == names


def test_one_document_that_is_refused_fails_the_attempt(tmp_path, arrays):
    objects = MeetingStore(tmp_path, len(arrays) + 1, fail=f"{arrays[-1].site}/zarr.json")
    with pytest.raises(StoreError, match="refused"):
        AttemptWriter(objects, 3, "a", run_id="00" * 8).put_metadata(arrays)
