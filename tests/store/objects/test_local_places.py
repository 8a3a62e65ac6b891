"""A place where no folder can be made says so, and not that an object is missing."""

from __future__ import annotations

import pytest

from store.errors import ObjectNotFound, StoreError
from store.objects.local import LocalStore


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    objects = LocalStore(tmp_path / "file" / "run")
    for write in (lambda: objects.create("a", b"x"), lambda: objects.put("a", [b"x"])):
        with pytest.raises(StoreError, match="cannot make the folder") as caught:
            write()
        assert not isinstance(caught.value, ObjectNotFound)
