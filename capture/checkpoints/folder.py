"""A checkpoint folder that is either complete or not there: made aside, then renamed.

Knows nothing of models: a `build` function fills an empty folder, and `complete.json`, written
last, says from which recipe and lists the files with their sizes. A folder of another recipe, or
one that lost a file, is made again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

COMPLETE = "complete.json"


def prepared(dest: Path, recipe: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """Return `dest`, filled by `build` unless it already holds exactly this recipe's files.

    `recipe` must survive JSON. Two processes may prepare the same folder at once: both build, one
    rename wins, and both get a complete folder.
    """
    dest = dest.resolve()
    recipe = json.loads(json.dumps(recipe))
    if is_complete(dest, recipe):
        return dest
    dest.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        scratch.chmod(0o755)
        build(scratch)
        sizes = {
            str(path.relative_to(scratch)): path.stat().st_size
            for path in sorted(scratch.rglob("*"))
            if path.is_file()
        }
        record = {"recipe": recipe, "files": sizes}
        (scratch / COMPLETE).write_text(json.dumps(record, indent=1) + "\n")
        _rename(scratch, dest, recipe)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return dest


def is_complete(dest: Path, recipe: Mapping[str, Any]) -> bool:
    """Return whether `dest` was finished from `recipe` and still has every file at its size."""
    try:
        record = json.loads((dest / COMPLETE).read_text())
        return record["recipe"] == recipe and all(
            (dest / name).stat().st_size == size for name, size in record["files"].items()
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _rename(scratch: Path, dest: Path, recipe: Mapping[str, Any]) -> None:
    if dest.exists() and not is_complete(dest, recipe):
        stale = Path(tempfile.mkdtemp(prefix=f".{dest.name}.stale.", dir=dest.parent))
        try:
            dest.rename(stale / "old")
        finally:
            shutil.rmtree(stale, ignore_errors=True)
    try:
        scratch.rename(dest)
    except OSError:
        if not is_complete(dest, recipe):
            raise
