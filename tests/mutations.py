"""Plant a bug in each attention semantic and see the family checks fail: `make mutations`.

Each mutation replaces one piece of source in a copy of the tree; the check of one family, run there
on the real engine, must find rows that are wrong. The unchanged families are captured first, all in
one process, and must pass. A bug of the reader is planted where these captures are read. What was
seen is written to docs/mutations.md; with arguments, only mutations whose names hold one of them
are run again and the other rows stay. A test makes sure that every piece is still found exactly
once, so that this cannot rot.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests import conftest
from tests.capture.test_models import capture_families, check_family

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "mutations.md"

HEAD = """# Planted bugs

Written by `make mutations`; do not edit. Each bug is planted alone in a copy of the tree, in which
one family is then captured on the real engine (bugs in `store/`: read from a capture without them)
and compared with transformers, as [models.md](models.md) tells. The last column is what that
comparison said; a bug that it does not notice is a fault of the tests.

| bug | in | family, ranks | noticed | what the check said |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Mutation:
    """A planted bug, and the family (on so many ranks) whose check must notice it."""

    name: str
    file: str
    old: str
    new: str
    family: str
    ranks: int = 1

    @property
    def of_reader(self) -> bool:
        """Whether the bug is in what reads, so that rows captured without it will do."""
        return self.file.startswith("store/")


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
    Mutation(
        "a mask that shows one key more",
        "store/attention.py",
        "distance_QK <= -semantics.sliding_window",
        "distance_QK < -semantics.sliding_window",
        "gemma2",
    ),
    Mutation(
        "a mask that shows the next token",
        "store/attention.py",
        "hidden_QK = distance_QK > 0",
        "hidden_QK = distance_QK > 1",
        "qwen3",
    ),
    Mutation("no sinks", _LAYERS, "sinks=_floats(sinks)", "sinks=None", "gpt_oss"),
    Mutation(
        "no soft-cap",
        _LAYERS,
        "logit_softcap=float(softcap) if softcap else None",
        "logit_softcap=None",
        "gemma2",
    ),
    Mutation(
        "sinks that are renormalised away",
        "store/attention.py",
        "total_NQ1 += np.exp(sinks_N11 - top_NQ1)",
        "total_NQ1 += 0 * np.exp(sinks_N11 - top_NQ1)",
        "gpt_oss",
    ),
    Mutation(
        "a soft-cap before the scale",
        "store/attention.py",
        "np.tanh(scores_NQK / cap, out=scores_NQK)",
        "np.tanh(scores_NQK / np.float32(semantics.scale) / cap, out=scores_NQK)",
        "gemma2",
    ),
    Mutation("no ALiBi", _LAYERS, "alibi_slopes=_floats(slopes)", "alibi_slopes=None", "bloom"),
    Mutation(
        "ALiBi slopes of the next head",
        "store/attention.py",
        "picked = [values[heads[place]] for place in places]",
        "picked = [values[heads[place] - 1] for place in places]",
        "bloom",
    ),
    Mutation(
        "z that has gone through a gate",
        "capture/step_block.py",
        "sink.put(reads.z, z)",
        "sink.put(reads.z, z * torch.sigmoid(z))",
        "afmoe",
    ),
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
    """Run every mutation (or those whose names hold an argument); return 1 if one went unseen."""
    assert conftest.MODELS
    wanted = [m for m in MUTATIONS if not sys.argv[1:] or any(a in m.name for a in sys.argv[1:])]
    rows = _kept_rows()
    unseen = 0
    with tempfile.TemporaryDirectory() as captures:
        kept = Path(captures)
        families = sorted({mutation.family for mutation in wanted if mutation.ranks == 1})
        for family, captured in capture_families(kept, families).items():
            check_family(family, captured)
            print(f"right  {family} as it is", flush=True)
        for mutation in wanted:
            with tempfile.TemporaryDirectory() as folder:
                tree = Path(folder)
                _copy_tree(tree)
                file = tree / mutation.file
                file.write_text(mutated(file.read_text(), mutation))
                done = _check(tree, mutation, kept)
            seen = done.returncode == 1 and "is wrong" in done.stdout
            unseen += not seen
            told = _told(done)
            print(f"{'seen  ' if seen else 'UNSEEN'} {mutation.name}: {told}", flush=True)
            where = f"{mutation.family}, {mutation.ranks}"
            noticed = "yes" if seen else "NO"
            cells = (mutation.name, f"`{mutation.file}`", where, noticed, told)
            rows[mutation.name] = f"| {' | '.join(cells)} |"
            table = [rows.get(m.name, f"| {m.name} | | | not run | |") for m in MUTATIONS]
            DOCUMENT.write_text(HEAD + "\n".join(table) + "\n")
    return min(unseen, 1)


def _kept_rows() -> dict[str, str]:
    if not DOCUMENT.exists():
        return {}
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")][1:]
    return {row.split(" | ")[0][2:]: row for row in rows}


def _told(done: subprocess.CompletedProcess[str]) -> str:
    """Return the check's last word, short enough for a table."""
    text = " ".join((done.stdout.strip() or done.stderr[-400:]).split()).replace("|", "/")
    return text.partition("is wrong: ")[2][:140] if "is wrong: " in text else text[-140:]


def _copy_tree(tree: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / ".cache").symlink_to(ROOT / ".cache")


def _check(tree: Path, mutation: Mutation, kept: Path) -> subprocess.CompletedProcess[str]:
    arguments = [mutation.family, str(mutation.ranks), *([str(kept)] if mutation.of_reader else [])]
    return subprocess.run(
        [sys.executable, "-m", "tests.capture.check_family", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


if __name__ == "__main__":
    raise SystemExit(main())
