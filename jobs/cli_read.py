"""The verbs that read a run: `show`, `query`, `export`. None of them needs torch or Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jobs.cli_shared import JsonOption, RunArgument, StoreOption, parsed, told


def show(
    run_url: RunArgument,
    prompt: Annotated[str, typer.Option("--prompt", help="Prompt id.")],
    layer: Annotated[int, typer.Option("--layer", help="Layer number.")],
    head: Annotated[int, typer.Option("--head", help="Query head.")],
    out: Annotated[Path, typer.Option("--out", "--output", help="The PNG to write.")] = Path(
        "pattern.png"
    ),
    as_json: JsonOption = False,
    options: StoreOption = [],  # noqa: B006
) -> None:
    """Draw one head's attention pattern as a PNG, its tokens as labels."""
    with told():
        from store import open_run
        from store.picture import draw_pattern

        found = open_run(run_url, parsed(options))
        pattern = found.pattern(prompt=prompt, layer=layer, head=head)
        path = draw_pattern(pattern, out, model=found.model.name)
        typer.echo(json.dumps({"path": str(path)}) if as_json else path)


def query(
    run_url: RunArgument,
    sql: Annotated[str, typer.Argument(help="DuckDB SQL over prompts, tokens and units.")],
    form: Annotated[
        str, typer.Option("--format", help="table, csv, parquet or json (one object a line).")
    ] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "--output", help="Write it here.")] = None,
    options: StoreOption = [],  # noqa: B006
) -> None:
    """Answer an SQL query over a run's prompts."""
    from jobs.verbs.query import parse_format
    from jobs.verbs.query import query as answer

    with told():
        chosen = parse_format("json" if as_json else form)
        answer(run_url, sql, form=chosen, out=out, options=parsed(options))


def export(
    run_url: RunArgument,
    to: Annotated[
        str, typer.Option("--to", help="numpy, safetensors, zarr, icechunk or hf-dataset.")
    ],
    out: Annotated[Path, typer.Option("--out", "--output", help="A new folder.")],
    prompts: Annotated[list[str], typer.Option("--prompt", help="Prompt id; repeat.")] = [],  # noqa: B006
    where: Annotated[str | None, typer.Option("--where", help="SQL condition on prompts.")] = None,
    sites: Annotated[list[str], typer.Option("--site", help="Site; repeat.")] = [],  # noqa: B006
    layers: Annotated[list[int], typer.Option("--layer", help="Layer; repeat.")] = [],  # noqa: B006
    heads: Annotated[list[int], typer.Option("--head", help="Head; repeat.")] = [],  # noqa: B006
    dtype: Annotated[str | None, typer.Option("--dtype", help="Such as float32.")] = None,
    as_json: JsonOption = False,
    options: StoreOption = [],  # noqa: B006
) -> None:
    """Write chosen prompts and sites as files of another kind."""
    from jobs.verbs.export import ExportRequest, export_run

    with told():
        request = ExportRequest(to, out, prompts, where, sites, layers, heads, dtype)
        report = export_run(run_url, request, parsed(options))
        if as_json:
            body = {"kind": report.kind.value, "path": str(report.path)}
            typer.echo(json.dumps({**body, "prompts": report.prompts, "bytes": report.bytes}))
        else:
            typer.echo(f"{report.path}: {report.prompts} prompts, {report.bytes:,} bytes")
