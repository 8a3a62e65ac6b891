"""Plant a bug in each attention semantic and see the family checks fail: `make mutations`.

Each mutation replaces one piece of source in a copy of the tree; the check of one family, run there
on the real engine, must end with 1. The unchanged copy must end with 0. A test makes sure that
every piece is still found exactly once, so that this cannot rot.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    """A planted bug, and the family (on so many ranks) whose check must notice it."""

    name: str
    file: str
    old: str
    new: str
    family: str
    ranks: int = 1


_LAYERS = "capture/attention_layers.py"

MUTATIONS = (
    Mutation(
        "the usual scale in place of the model's own",
        _LAYERS,
        "scale=float(impl.scale)",
        "scale=float(module.head_size) ** -0.5",
        "granite",
    ),
    Mutation(
        "a window that is one key short",
        _LAYERS,
        "sliding_window=module.sliding_window",
        "sliding_window=module.sliding_window and module.sliding_window - 1",
        "mistral",
    ),
    Mutation(
        "kv heads dealt out in turn",
        "store/attention.py",
        "return head * semantics.num_kv_heads // semantics.num_heads",
        "return head % semantics.num_kv_heads",
        "mistral",
    ),
    Mutation("no sinks", _LAYERS, "sinks=_floats(sinks)", "sinks=None", "gpt_oss"),
    Mutation(
        "no soft-cap",
        _LAYERS,
        "logit_softcap=float(softcap) if softcap else None",
        "logit_softcap=None",
        "gemma2",
    ),
    Mutation("no ALiBi", _LAYERS, "alibi_slopes=_floats(slopes)", "alibi_slopes=None", "bloom"),
    Mutation(
        "ranks' heads exchanged",
        "capture/heads.py",
        "first, shard, writes = rank * local, rank, True",
        "first, shard, writes = rank * local, ranks - 1 - rank, True",
        "qwen3",
        ranks=2,
    ),
    Mutation(
        "rows of a prompt one place late",
        "capture/shard_loop.py",
        "copy_rows(self.chunks_GCgtD, row, staged_GCgtD, staged, count)",
        "copy_rows(self.chunks_GCgtD, row, staged_GCgtD, max(0, staged - 1), count)",
        "mistral",
    ),
)


def mutated(source: str, mutation: Mutation) -> str:
    """Return `source` with the bug in it; the piece must be there exactly once."""
    if source.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.file} holds {mutation.old!r} {source.count(mutation.old)} times"
        )
    return source.replace(mutation.old, mutation.new)


def main() -> int:
    """Run every mutation (or those whose names hold an argument); return how many went unseen."""
    wanted = [m for m in MUTATIONS if not sys.argv[1:] or any(a in m.name for a in sys.argv[1:])]
    unseen = 0
    for mutation in wanted:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            _copy_tree(tree)
            file = tree / mutation.file
            file.write_text(mutated(file.read_text(), mutation))
            done = _check(tree, mutation)
        seen = done.returncode == 1 and "is wrong" in done.stdout
        unseen += not seen
        told = done.stdout.strip().splitlines()[-1][:160] if done.stdout.strip() else ""
        print(f"{'seen  ' if seen else 'UNSEEN'} {mutation.name}: {told}", flush=True)
    return min(unseen, 1)


def _copy_tree(tree: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / ".cache").symlink_to(ROOT / ".cache")


def _check(tree: Path, mutation: Mutation) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.capture.check_family", mutation.family, str(mutation.ranks)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


if __name__ == "__main__":
    raise SystemExit(main())
