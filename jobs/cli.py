"""The `attnstore` command: thin verbs over what the packages do, and nothing of their own.

Ray, torch and vLLM are imported only inside the verbs that start workers, so that an analyst's
install without them has every other verb. Exit codes: 0 done; 2 refused or stopped (also: problems
found by `verify`); 3 done but some prompts failed; 75 interrupted, run again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jobs.errors import ConfigError, ExitCode, JobError
from store.errors import RunError, StoreError

app = typer.Typer(
    name="attnstore",
    help="Capture transformer attention, store it durably, read any slice of it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Path or URL of a run.")]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A run's YAML config.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the config.")
]
StoreOption = Annotated[
    list[str],
    typer.Option("--option", metavar="KEY=VALUE", help="Option of the run's object store."),
]


@app.command()
def run(
    config: ConfigArgument,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    as_json: Annotated[
        bool, typer.Option("--json", help="Progress and logs as JSON lines.")
    ] = False,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add the config's prompts to the run it already made.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Work on the run even if another driver seems to.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what would be stored and how long."),
    ] = False,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="For --dry-run: of one worker while it captures.")
    ] = None,
    store_gb_per_second: Annotated[
        float | None, typer.Option(help="For --dry-run: what the object store takes in.")
    ] = None,
    dollars_per_tb_month: Annotated[
        float | None, typer.Option(help="For --dry-run: the price of storage.")
    ] = None,
    log_units: Annotated[
        bool, typer.Option("--log-units", help="Log every unit's assignment and commit.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what the workers and their engines print.")
    ] = False,
) -> None:
    """Capture what is missing of a run; running again resumes it."""
    from jobs.config_file import load_config
    from jobs.driver import RunOptions
    from jobs.driver import run as run_job
    from jobs.dry_run import preview
    from jobs.estimate import Rates
    from jobs.event_log import EventLog
    from jobs.progress import human_bytes, progress_view

    with _told():
        settings = load_config(config, overrides)
        if dry_run:
            gigabytes = store_gb_per_second
            rates = Rates(
                tokens_per_second=tokens_per_second,
                store_bytes_per_second=gigabytes * 1e9 if gigabytes else None,
                dollars_per_tb_month=dollars_per_tb_month,
            )
            _print_estimate(preview(settings, rates), as_json=as_json)
            return
        outcome = run_job(
            settings,
            RunOptions(extend=extend, take_over=take_over, verbose=verbose),
            EventLog(as_json=as_json, every_unit=log_units),
            lambda: progress_view(as_json=as_json),
        )
        status = outcome.status
        if as_json:
            body = {"run": outcome.run_id, "exit_code": int(outcome.exit_code)}
            typer.echo(json.dumps({**body, **status.as_json()}))
        else:
            typer.echo(
                f"{settings.output}: {status.prompts_stored} of {status.prompts_planned} prompts "
                f"stored, {status.prompts_failed} failed, {status.prompts_skipped} skipped, "
                f"{human_bytes(status.bytes)}"
            )
            if status.prompts_failed:
                typer.echo(f"what failed, and why: attnstore ls {settings.output} --failed")
    raise typer.Exit(int(outcome.exit_code))


@app.command()
def submit(
    config: ConfigArgument,
    address: Annotated[
        str, typer.Option("--address", help="Ray's dashboard, e.g. http://head:8265.")
    ],
    overrides: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Submit a run to a Ray cluster as a job; submitting again finds the job at work."""
    from jobs.config_file import load_config
    from jobs.submit import submit as submit_job

    with _told():
        submitted = submit_job(load_config(config, overrides), address)
    if as_json:
        body = {"submission_id": submitted.submission_id, "created": submitted.created}
        typer.echo(json.dumps(body))
    else:
        state = "submitted" if submitted.created else "already at work"
        typer.echo(f"{submitted.submission_id} {state}")


@app.command()
def manifest(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="kuberay")],
    config: ConfigArgument,
    image: Annotated[str, typer.Option("--image", help="Image with attnstore and Ray in it.")],
    name: Annotated[str, typer.Option("--name", help="Name of the RayJob.")] = "attnstore",
    cpus: Annotated[int, typer.Option("--cpus", help="CPUs of a worker's pod.")] = 8,
    memory: Annotated[str, typer.Option("--memory", help="Memory of a worker's pod.")] = "64Gi",
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="GPUs of a worker; tensor_parallel_size if absent.")
    ] = None,
    secret: Annotated[
        str | None, typer.Option("--secret", help="Secret with the object store's credentials.")
    ] = None,
    backoff_limit: Annotated[
        int, typer.Option("--backoff-limit", help="How often a new cluster takes the run up again.")
    ] = 20,
    overrides: SetOption = [],  # noqa: B006
) -> None:
    """Print a manifest that runs a config on Kubernetes."""
    from jobs.config_file import load_config
    from jobs.kuberay import PodShape
    from jobs.kuberay import manifest as kuberay_manifest

    with _told():
        if kind != "kuberay":
            raise ConfigError(f"no manifest of kind {kind!r}; there is: kuberay")
        pods = PodShape(
            image=image, name=name, cpus=cpus, memory=memory, gpus=gpus, secret=secret,
            backoff_limit=backoff_limit,
        )  # fmt: skip
        typer.echo(kuberay_manifest(load_config(config, overrides), pods), nl=False)


@app.command()
def status(
    run_url: RunArgument,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again until it is done.")] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between looks.")] = 5.0,
    options: StoreOption = [],  # noqa: B006
) -> None:
    """Say how far a run is, from its storage alone."""
    from jobs.prepare import read_manifest
    from jobs.status import read_status

    with _told():
        objects = _open(run_url, options)
        read_manifest(objects)
        while True:
            found = read_status(objects)
            if as_json:
                typer.echo(json.dumps(found.as_json()))
            else:
                _print_status(run_url, found)
            if not watch or found.complete:
                return
            time.sleep(every)


@app.command()
def verify(
    run_url: RunArgument,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every stored byte, not only sizes and documents.")
    ] = False,
    as_json: JsonOption = False,
    options: StoreOption = [],  # noqa: B006
) -> None:
    """Check that everything a run says it holds is there and undamaged."""
    from jobs.prepare import read_manifest
    from store.verify import verify_run

    with _told():
        objects = _open(run_url, options)
        read_manifest(objects)
        report = verify_run(objects, deep=deep)
    if as_json:
        problems = [{"name": p.name, "message": p.message, "unit": p.unit} for p in report.problems]
        body = {"ok": report.ok, "deep": deep, "units": report.units, "objects": report.objects}
        typer.echo(json.dumps({**body, "bytes": report.bytes, "problems": problems}))
    else:
        for problem in report.problems:
            typer.echo(f"{problem.name}: {problem.message}")
        verdict = "all good" if report.ok else f"{len(report.problems)} problems"
        kind = "every byte of" if deep else "names and sizes of"
        typer.echo(f"{verdict}: {kind} {report.objects} objects in {report.units} units looked at")
    raise typer.Exit(int(ExitCode.DONE if report.ok else ExitCode.REFUSED))


@app.command()
def show(
    run_url: RunArgument,
    prompt: Annotated[str, typer.Option("--prompt", help="Prompt id.")],
    layer: Annotated[int, typer.Option("--layer", help="Layer number.")],
    head: Annotated[int, typer.Option("--head", help="Query head.")],
    out: Annotated[Path, typer.Option("--out", "--output", help="The PNG to write.")] = Path(
        "pattern.png"
    ),
    options: StoreOption = [],  # noqa: B006
) -> None:
    """Draw one head's attention pattern as a PNG, its tokens as labels."""
    with _told():
        from store import open_run
        from store.picture import draw_pattern

        found = open_run(run_url, _parsed(options))
        pattern = found.pattern(prompt=prompt, layer=layer, head=head)
        typer.echo(draw_pattern(pattern, out, model=found.model.name))


@app.command(name="ls")
def list_prompts(
    run_url: RunArgument,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only prompts that are not stored, and why.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    limit: Annotated[int, typer.Option("--limit", help="At most so many; 0 for all.")] = 0,
    options: StoreOption = [],  # noqa: B006
) -> None:
    """List a run's prompts: id, tokens, what became of them and why."""
    from jobs.listing import prompt_rows

    with _told():
        objects = _open(run_url, options)
        for row in islice(prompt_rows(objects, only_failed=failed), limit or None):
            if as_json:
                typer.echo(json.dumps(row.as_json(), ensure_ascii=False))
            else:
                reason = f"  {row.reason}" if row.reason else ""
                typer.echo(f"{row.prompt_id}\t{row.num_tokens}\t{row.status}{reason}")


def _print_estimate(found: Any, *, as_json: bool) -> None:
    from jobs.progress import human_bytes, human_seconds

    if as_json:
        typer.echo(json.dumps(found.as_json()))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    unusable = f", {found.unusable} of them cannot be captured" if found.unusable else ""
    table.add_row("prompts", f"{found.prompts}{unusable}")
    table.add_row("tokens", f"{found.tokens} in {found.units} units")
    for site, count in found.site_bytes.items():
        table.add_row(f"raw {site}", f"{count} ({human_bytes(count)})")
    table.add_row("raw bytes", f"{found.raw_bytes} ({human_bytes(found.raw_bytes)})")
    table.add_row("expected", f"{human_bytes(found.stored_bytes)} with the run's codec")
    table.add_row("objects", str(found.objects))
    if found.hours is not None:
        bound = f", bound by {found.bound_by}" if found.bound_by else ""
        table.add_row("time", f"{human_seconds(found.hours * 3600)}{bound}")
    if found.dollars_per_month is not None:
        table.add_row("cost", f"${found.dollars_per_month:.2f} a month")
    Console().print(table)


@app.command()
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

    with _told():
        chosen = parse_format("json" if as_json else form)
        answer(run_url, sql, form=chosen, out=out, options=_parsed(options))


@app.command()
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

    with _told():
        request = ExportRequest(to, out, prompts, where, sites, layers, heads, dtype)
        report = export_run(run_url, request, _parsed(options))
        if as_json:
            body = {"kind": report.kind.value, "path": str(report.path)}
            typer.echo(json.dumps({**body, "prompts": report.prompts, "bytes": report.bytes}))
        else:
            typer.echo(f"{report.path}: {report.prompts} prompts, {report.bytes:,} bytes")


def _print_status(run_url: str, found: Any) -> None:
    from jobs.progress import human_bytes

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("run", run_url)
    quarantined = f", {found.units_quarantined} quarantined" if found.units_quarantined else ""
    table.add_row("units", f"{found.units_committed} of {found.units_planned}{quarantined}")
    table.add_row(
        "prompts",
        f"{found.prompts_stored} of {found.prompts_planned} stored, {found.prompts_failed} failed, "
        f"{found.prompts_skipped} skipped",
    )
    table.add_row("bytes", human_bytes(found.bytes))
    Console().print(table)


def _open(run_url: str, options: list[str]) -> Any:
    from store.objects.open import open_store

    return open_store(run_url, _parsed(options))


def _parsed(options: list[str]) -> dict[str, Any]:
    from jobs.config_file import apply_override

    body: dict[str, Any] = {}
    for option in options:
        apply_override(body, option)
    return body


@contextmanager
def _told() -> Iterator[None]:
    """Turn the errors that a user can act on into one message and an exit code."""
    try:
        yield
    except JobError as error:
        _fail(error, int(error.exit_code))
    except (RunError, StoreError) as error:
        _fail(error, int(ExitCode.REFUSED))


def _fail(error: Exception, code: int) -> None:
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    typer.echo(f"attnstore: {kind}{error}", err=True)
    raise typer.Exit(code) from error


if __name__ == "__main__":
    app()
