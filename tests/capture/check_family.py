"""Capture one family and compare it with transformers: `python -m tests.capture.check_family F N`.

With a third argument, a folder that `capture_families` filled, it reads what is there instead. Ends
with 0 where every row is right, 1 where a check fails. The mutation script runs it over trees with
a planted bug.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests import conftest
from tests.capture.live_capture import kept_capture
from tests.capture.test_models import capture_families, check_family, wanted_families


def main() -> int:
    """Capture the family named first on as many ranks as named second; print what differs."""
    assert conftest.MODELS
    family, ranks = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 3:
            captured = kept_capture(wanted_families(Path(sys.argv[3]), [family], ranks)[family])
        else:
            captured = capture_families(Path(folder), [family], ranks)[family]
        try:
            worst = check_family(family, captured)
        except AssertionError as error:
            print(f"{family} on {ranks} ranks is wrong: {error}")
            return 1
    print(f"{family} on {ranks} ranks is right: {worst}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
