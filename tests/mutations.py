"""Plant a bug in each attention semantic and see tests fail: `make mutations`.

Each mutation replaces one piece of source in a copy of the tree. There a fast test must fail, and
the check of one family on the real engine must find rows that are wrong. The unchanged families are
captured first, all in one process, and must pass; a bug of the reader is planted where these
captures are read. What was seen is written to docs/mutations.md. With arguments, only mutations
whose names hold one of them are run again; with `--fast` or `--engine` first, only that part: other
cells stay.
A test makes sure that every piece is still found exactly once, so that this cannot rot.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests import conftest
from tests.capture.live_capture import Captured
from tests.capture.test_models import capture_families, check_family

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "mutations.md"

HEAD = """# Planted bugs

Written by `make mutations`; do not edit. Each bug is planted alone in a copy of the tree. There a
fast test fails, named in the third column; and one family, captured on the real engine (bugs in
`store/`: read from a capture without them) and compared with transformers, is found wrong: the last
columns are the family, on how many ranks, whether it was noticed, and what was said.

| bug | in | fast test | family, ranks | noticed | what the check said |
|---|---|---|---|---|---|
"""
NOT_RUN = "not run"
UNNOTICED = "NO"

FAST_TESTS = {
    "capture/attention_layers.py": "tests/capture/test_attention_layers.py",
    "capture/heads.py": "tests/capture/test_heads.py",
    "capture/pattern_making.py": "tests/capture/test_pattern_batches.py",
    "capture/shard_loop.py": "tests/capture/test_assembly.py",
    "store/attention.py": "tests/store/test_attention.py",
    "store/run.py": "tests/store/test_weights.py",
}
"""Source -> the test of it that needs no engine."""


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
        "ranks' ALiBi slopes exchanged",
        _LAYERS,
        "[v.alibi_slopes for v in views]",
        "[v.alibi_slopes for v in views[::-1]]",
        "bloom",
        ranks=2,
    ),
    Mutation(
        "ranks' sinks exchanged",
        _LAYERS,
        "[v.sinks for v in views]",
        "[v.sinks for v in views[::-1]]",
        "gpt_oss",
        ranks=2,
    ),
    Mutation(
        "ranks' parts of W_O exchanged",
        "capture/engine.py",
        "[weight for weight, _ in parts]",
        "[weight for weight, _ in parts[::-1]]",
        "qwen3",
        ranks=2,
    ),
    Mutation(
        "W_O of the next head",
        "store/run.py",
        "w_o_HDM[heads.labels])",
        "w_o_HDM[heads.labels - 1])",
        "mistral",
    ),
    Mutation(
        "no bias of W_O",
        "store/run.py",
        "bias_M = projection.bias_M",
        "bias_M = None",
        "gpt_neox",
    ),
    Mutation(
        "contributions of a gated model that leave out the gate",
        "store/run.py",
        "Site.PROJ_IN if Site.PROJ_IN in self.sites else Site.Z",
        "Site.Z",
        "afmoe",
    ),
    Mutation(
        "stored patterns of the next head",
        "capture/pattern_making.py",
        "pack_query_rows(pattern(semantics, q_BNTD, k_BGTD)",
        "pack_query_rows(np.roll(pattern(semantics, q_BNTD, k_BGTD), 1, axis=1)",
        "gemma2",
    ),
    Mutation(
        "q and k exchanged",
        "capture/step_block.py",
        "((reads.rot_q, query), (reads.rot_k, key),",
        "((reads.rot_q, key), (reads.rot_k, query),",
        "gpt_neox",
    ),
    Mutation(
        "every step's rows taken for a prompt's first",
        "capture/adapters/vllm_runner.py",
        "int(state.num_computed_tokens)",
        "0 * int(state.num_computed_tokens)",
        "mistral",
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


@dataclass
class Seen:
    """A mutation's row of the document."""

    fast: str = NOT_RUN
    noticed: str = NOT_RUN
    told: str = ""

    def row(self, mutation: Mutation) -> str:
        where = f"{mutation.family}, {mutation.ranks}"
        file = f"`{mutation.file}`"
        return (
            f"| {mutation.name} | {file} | {self.fast} | {where} | {self.noticed} | {self.told} |"
        )


def main() -> int:
    """Run every mutation (or those whose names hold an argument); return 1 if one went unseen."""
    assert conftest.MODELS
    names = sys.argv[1:]
    part = names.pop(0) if names[:1] in (["--fast"], ["--engine"]) else ""
    wanted = [m for m in MUTATIONS if not names or any(name in m.name for name in names)]
    rows = read_document()
    unseen = 0
    with tempfile.TemporaryDirectory() as captures:
        kept = Path(captures)
        families = sorted({mutation.family for mutation in wanted if mutation.ranks == 1})
        clean: dict[str, Captured] = {}
        if families and part != "--fast":
            clean = capture_families(kept, families)
        for family, captured in clean.items():
            check_family(family, captured)
            print(f"right  {family} as it is", flush=True)
        for mutation in wanted:
            seen = rows.setdefault(mutation.name, Seen())
            with tempfile.TemporaryDirectory() as folder:
                tree = Path(folder)
                _copy_tree(tree)
                file = tree / mutation.file
                file.write_text(mutated(file.read_text(), mutation))
                if part != "--engine":
                    seen.fast = _fast(tree, mutation)
                if part != "--fast":
                    done = _check(tree, mutation, kept)
                    noticed = done.returncode == 1 and "is wrong" in done.stdout
                    seen.noticed, seen.told = "yes" if noticed else UNNOTICED, _told(done)
            unseen += UNNOTICED in (seen.fast, seen.noticed)
            print(seen.row(mutation), flush=True)
            table = [rows.get(m.name, Seen()).row(m) for m in MUTATIONS]
            DOCUMENT.write_text(HEAD + "\n".join(table) + "\n")
    return min(unseen, 1)


def read_document() -> dict[str, Seen]:
    """Return what the document says of each mutation, by name."""
    if not DOCUMENT.exists():
        return {}
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in row[2:-1].split(" | ")] for row in rows]
    return {row[0]: Seen(row[2], row[4], row[5]) for row in cells}


def _fast(tree: Path, mutation: Mutation) -> str:
    """Return the first fast test that fails, "none" where there is no test without an engine."""
    if mutation.file not in FAST_TESTS:
        return "none"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", FAST_TESTS[mutation.file]],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    failed = re.findall(r"^FAILED (\S+)::(\w+)", done.stdout, re.MULTILINE)
    return f"`{failed[0][1]}`" if failed else UNNOTICED


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
