"""Which sites a run keeps, and whether a commit that calls prompts stored holds them. Pure.

A probe's sites have names of the user's own, which no config tells, so they are not asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from store.run_format import Commit, Outcome, Site


def due_sites(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the sites that every unit of a run of this config holds; none where it says none."""
    capture = config.get("capture")
    if not isinstance(capture, Mapping):
        return frozenset()
    stated = capture.get("sites")
    sites = {str(one) for one in stated} if isinstance(stated, (list, tuple)) else set()
    if capture.get("pattern") == "stored":
        sites.add(str(Site.PATTERN))
    return frozenset(sites & {str(site) for site in Site})


def site_contradictions(commit: Commit, due: frozenset[str]) -> Iterator[str]:
    """Yield the sites that a commit of stored prompts should hold and does not."""
    if Outcome.STORED not in commit.prompts.outcome:
        return
    held = [array.site for array in commit.arrays]
    for site in sorted(due.difference(held)):
        yield (
            f"holds no {site}, which run.json says the run keeps; it holds "
            f"{', '.join(held) or 'nothing'}"
        )
