"""The verbs that look after a run in its storage: `status`, `ls`, `verify`, `gc`."""

from __future__ import annotations

import json
import time
from itertools import islice
from typing import Annotated, Any

import typer

from jobs.cli_shared import JsonOption, RunArgument, StoreOption, finite, kept_run, print_facts
from jobs.errors import ExitCode
from jobs.one_line import one_line
from store.byte_count import human_bytes
from store.selection import describe_bare

_NO_PLAN = "none yet: it is being made, or was interrupted in that; then run the config again"


def status(
    run_url: RunArgument,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again until it is done.")] = False,
    every: Annotated[
        float,
        typer.Option("--every", min=0, max=86_400, callback=finite, help="Seconds between looks."),
    ] = 5.0,
    options: StoreOption = [],  # noqa: B006
) -> None:
    """Say how far a run is, from its storage alone."""
    from jobs.status import read_status

    with kept_run(run_url, options) as objects:
        while True:
            found = read_status(objects)
            if as_json:
                typer.echo(json.dumps(found.as_json()))
            else:
                _print_status(run_url, found)
            if found.damaged:
                raise typer.Exit(int(ExitCode.REFUSED))
            if not watch or found.complete:
                return
            time.sleep(every)


def list_prompts(
    run_url: RunArgument,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only prompts that are not stored, and why.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many; 0 for all.")] = 0,
    options: StoreOption = [],  # noqa: B006
) -> None:
    """List a run's prompts: id, tokens, what became of them and why."""
    from jobs.listing import prompt_rows

    with kept_run(run_url, options) as objects:
        for row in islice(prompt_rows(objects, only_failed=failed), limit or None):
            if as_json:
                typer.echo(json.dumps(row.as_json(), ensure_ascii=False))
            else:
                reason = f"  {one_line(row.reason)}" if row.reason else ""
                typer.echo(f"{one_line(row.prompt_id)}\t{row.num_tokens}\t{row.status}{reason}")


def verify(
    run_url: RunArgument,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every stored byte, not only sizes and documents.")
    ] = False,
    as_json: JsonOption = False,
    options: StoreOption = [],  # noqa: B006
) -> None:
    """Check that everything a run says it holds is there and undamaged."""
    from store.verify import verify_run

    with kept_run(run_url, options) as objects:
        report = verify_run(objects, deep=deep)
    if as_json:
        problems = [{"name": p.name, "message": p.message, "unit": p.unit} for p in report.problems]
        body = {"ok": report.ok, "deep": deep, "units": report.units, "objects": report.objects}
        typer.echo(json.dumps({**body, "bytes": report.bytes, "problems": problems}))
    else:
        for problem in report.problems:
            typer.echo(f"{one_line(problem.name)}: {problem.message}")
        verdict = "all good" if report.ok else f"{len(report.problems)} problems"
        kind = "every byte of" if deep else "names and sizes of"
        typer.echo(f"{verdict}: {kind} {report.objects} objects in {report.units} units looked at")
    raise typer.Exit(int(ExitCode.DONE if report.ok else ExitCode.REFUSED))


def gc(
    run_url: RunArgument,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete it; without this it is only listed.")
    ] = False,
    as_json: JsonOption = False,
    options: StoreOption = [],  # noqa: B006
) -> None:
    """List what nothing refers to any more: lost attempts, old snapshots, left-over files."""
    from store.gc import collect_garbage

    with kept_run(run_url, options) as objects:
        report = collect_garbage(objects, delete=delete)
    if as_json:
        folders = [
            {"prefix": g.prefix, "unit": g.unit, "objects": g.objects, "bytes": g.bytes}
            for g in report.garbage
        ]
        body = {"deleted": delete, "bytes": report.bytes, "garbage": folders}
        typer.echo(json.dumps({**body, "temporary_files": report.temporary_files}))
        return
    for garbage in report.garbage:
        typer.echo(f"{garbage.prefix}\t{garbage.objects} objects\t{human_bytes(garbage.bytes)}")
    word = "deleted" if delete else "could be deleted (with --delete)"
    typer.echo(
        f"{len(report.garbage)} folders and {report.temporary_files} temporary files, "
        f"{human_bytes(report.bytes)}: {word}"
    )


def _print_status(run_url: str, found: Any) -> None:
    quarantined = f", {found.units_quarantined} quarantined" if found.units_quarantined else ""
    damaged = f", {len(found.damaged)} damaged" if found.damaged else ""
    bare = describe_bare(found.layers_without_attention)
    missing = f"{found.prompts_failed} failed, {found.prompts_skipped} skipped"
    print_facts(
        [
            ("run", run_url),
            ("units", f"{found.units_committed} of {found.units_planned}{quarantined}{damaged}"),
            ("prompts", f"{found.prompts_stored} of {found.prompts_planned} stored, {missing}"),
            ("bytes", human_bytes(found.bytes)),
            *([] if found.units_planned else [("plan", _NO_PLAN)]),
            *(("damaged", one) for one in (found.damage(),) if one),
            *([("layers", bare)] if bare else []),
            *(("check", check.sentence()) for check in found.checks[-1:]),
        ]
    )
    if found.bound is not None:
        typer.echo(found.bound.sentence())
