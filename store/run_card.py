"""What a run says of itself at a glance: its `repr` in a terminal and its card in a notebook.

Knows facts that the run gathered; reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store.byte_count import human_bytes
from store.run_format import LayerSemantics, Outcome
from store.selection import describe, describe_bare


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a run's card."""

    url: str
    name: str
    dtype: str | None
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    without_attention: Mapping[str, Sequence[int]]
    heads: str
    units: tuple[int, int]
    prompts: dict[str, int]
    planned_prompts: int
    bytes: int
    damaged: tuple[int, int] = (0, 0)

    @classmethod
    def gather(
        cls,
        url: str,
        *,
        name: str,
        dtype: str | None,
        sites: Sequence[str],
        layers: Sequence[int],
        without_attention: Mapping[str, Sequence[int]],
        semantics: LayerSemantics | None,
        chosen_heads: Sequence[int] | None = None,
        planned: tuple[int, int],
        rows: Mapping[str, NDArray[np.int64]],
        damaged: tuple[int, int] = (0, 0),
    ) -> RunFacts:
        """Count what the commits say, one row a unit. `planned` is (units, prompts).

        So is `damaged`, of units whose commits cannot be read.

        `chosen_heads` are those that the config asked for; a run holds their whole groups.
        """
        counts = {str(outcome): int(rows[str(outcome)].sum()) for outcome in Outcome}
        heads = ""
        if semantics is not None:
            heads = (
                f"{semantics.num_heads} heads over {semantics.num_kv_heads} kv heads, "
                f"d_head {semantics.head_size}"
            )
            if chosen_heads:
                heads = f"the groups of heads {describe(sorted(chosen_heads))} of {heads}"
        return cls(
            url=url,
            name=name,
            dtype=dtype,
            sites=tuple(sites),
            layers=tuple(layers),
            without_attention=without_attention,
            heads=heads,
            units=(len(rows["unit"]), planned[0]),
            prompts=counts,
            planned_prompts=planned[1],
            bytes=int(rows["bytes"].sum()),
            damaged=damaged,
        )

    def as_row(self) -> dict[str, Any]:
        """Return the facts as one flat row for a table of runs."""
        return {
            "model": self.name,
            "dtype": self.dtype or "",
            "sites": ", ".join(self.sites),
            "layers": len(self.layers),
            "prompts": self.planned_prompts,
            "stored": self.prompts[str(Outcome.STORED)],
            "bytes": self.bytes,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the card's lines as (what, value)."""
        stored = self.prompts[str(Outcome.STORED)]
        others = [f"{n} {what}" for what, n in self.prompts.items() if n and what != Outcome.STORED]
        damaged_units, damaged = self.damaged
        if damaged:
            others.append(f"{damaged} damaged")
        pending = self.planned_prompts - sum(self.prompts.values()) - damaged
        if pending:
            others.append(f"{pending} pending")
        layers = describe(self.layers) + (f" x {self.heads}" if self.heads else "")
        bare = describe_bare(self.without_attention)
        prompts = f"{stored} of {self.planned_prompts} stored"
        return [
            ("model", f"{self.name} ({self.dtype or 'not started'})"),
            ("sites", ", ".join(self.sites) or "none yet"),
            ("layers", f"{layers}; {bare}" if bare else layers),
            ("prompts", prompts + (f" ({', '.join(others)})" if others else "")),
            (
                "units",
                f"{self.units[0]} of {self.units[1]} committed"
                + (f", {damaged_units} damaged: run `attnstore verify`" if damaged_units else ""),
            ),
            ("bytes", human_bytes(self.bytes)),
        ]


def as_text(facts: RunFacts) -> str:
    """Return the card for a terminal."""
    lines = [f"  {what:<8} {value}" for what, value in facts.rows()]
    return "\n".join([f"<Run {facts.url}>", *lines])


def as_html(facts: RunFacts) -> str:
    """Return the card for a notebook; everything from the run is escaped."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(what)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for what, value in facts.rows()
    )
    done, planned = facts.units
    share = 100 * done / planned if planned else 0
    bar = (
        '<div style="width:20em;height:.5em;background:#ddd;border-radius:.25em">'
        f'<div style="width:{share:.1f}%;height:100%;background:#3b76af;border-radius:.25em">'
        "</div></div>"
    )
    return f"<div><b>Run</b> <code>{escape(facts.url)}</code>{bar}<table>{rows}</table></div>"
