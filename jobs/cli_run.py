"""The verbs that make a run: `run`, `submit`, `manifest`. Only `run` and `submit` import Ray."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from jobs.cli_shared import ConfigArgument, JsonOption, SetOption, finite, print_facts, told
from jobs.errors import ConfigError
from store.byte_count import human_bytes


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
    repair: Annotated[
        bool, typer.Option("--repair", help="Verify first, and capture damaged units again.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="With --repair: read every stored byte.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what would be stored and how long."),
    ] = False,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(
            min=0, callback=finite, help="For --dry-run: of one worker while it captures."
        ),
    ] = None,
    store_gb_per_second: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="For --dry-run: what the object store takes in."),
    ] = None,
    dollars_per_tb_month: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="For --dry-run: the price of storage."),
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
    from jobs.progress import progress_view

    with told():
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
        log = EventLog(as_json=as_json, every_unit=log_units)
        outcome = run_job(
            settings,
            RunOptions(
                extend=extend, take_over=take_over, repair=repair, deep=deep, verbose=verbose
            ),
            log,
            lambda: progress_view(log),
        )
        status = outcome.status
        if as_json:
            body: dict[str, Any] = {"run": outcome.run_id, "exit_code": int(outcome.exit_code)}
            body["bound"] = outcome.bound.as_json() if outcome.bound else None
            typer.echo(json.dumps({**body, **status.as_json()}))
        else:
            typer.echo(
                f"{settings.output}: {status.prompts_stored} of {status.prompts_planned} prompts "
                f"stored, {status.prompts_failed} failed, {status.prompts_skipped} skipped, "
                f"{human_bytes(status.bytes)}"
            )
            if outcome.bound is not None:
                typer.echo(outcome.bound.sentence())
            if status.prompts_failed:
                typer.echo(f"what failed, and why: attnstore ls {settings.output} --failed")
    raise typer.Exit(int(outcome.exit_code))


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

    with told():
        submitted = submit_job(load_config(config, overrides), address)
    if as_json:
        body = {"submission_id": submitted.submission_id, "created": submitted.created}
        typer.echo(json.dumps(body))
    else:
        state = "submitted" if submitted.created else "already at work"
        typer.echo(f"{submitted.submission_id} {state}")


def manifest(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="kuberay")],
    config: ConfigArgument,
    image: Annotated[str, typer.Option("--image", help="Image with attnstore and Ray in it.")],
    name: Annotated[str, typer.Option("--name", help="Name of the RayJob.")] = "attnstore",
    cpus: Annotated[int, typer.Option("--cpus", min=1, help="CPUs of a worker's pod.")] = 8,
    memory: Annotated[str, typer.Option("--memory", help="Memory of a worker's pod.")] = "64Gi",
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=0, help="GPUs of a worker; tensor_parallel_size if absent."),
    ] = None,
    secret: Annotated[
        str | None, typer.Option("--secret", help="Secret with the object store's credentials.")
    ] = None,
    backoff_limit: Annotated[
        int,
        typer.Option("--backoff-limit", min=0, help="How often a new cluster takes the run on."),
    ] = 20,
    overrides: SetOption = [],  # noqa: B006
) -> None:
    """Print a manifest that runs a config on Kubernetes."""
    from jobs.config_file import load_config
    from jobs.kuberay import PodShape
    from jobs.kuberay import manifest as kuberay_manifest

    with told():
        if kind != "kuberay":
            raise ConfigError(f"no manifest of kind {kind!r}; there is: kuberay")
        pods = PodShape(
            image=image, name=name, cpus=cpus, memory=memory, gpus=gpus, secret=secret,
            backoff_limit=backoff_limit,
        )  # fmt: skip
        typer.echo(kuberay_manifest(load_config(config, overrides), pods), nl=False)


def _print_estimate(found: Any, *, as_json: bool) -> None:
    from jobs.progress import human_seconds
    from store.selection import describe, describe_bare

    if as_json:
        typer.echo(json.dumps(found.as_json()))
        return
    unusable = f", {found.unusable} of them cannot be captured" if found.unusable else ""
    most = " (the most: a continued prompt may end early)" if found.upper_bound else ""
    short = f"{found.cut_short} prompts have no room for generate.tokens within max_model_len"
    beyond = found.largest_unit_bytes > found.buffer_bytes
    alone = f", more than engine.buffer_bytes: {human_bytes(found.buffer_bytes)}" if beyond else ""
    bare = describe_bare(found.without_attention)
    facts = [
        ("layers", "; ".join(filter(None, (describe(found.layers), bare)))),
        ("prompts", f"{found.prompts}{unusable}"),
        *([("cut short", short)] if found.cut_short else []),
        ("tokens", f"{found.tokens} in {found.units} units{most}"),
        *([("rows", f"{found.rows} are kept")] if found.rows != found.tokens else []),
        *((f"raw {site}", f"{n} ({human_bytes(n)})") for site, n in found.site_bytes.items()),
        ("raw bytes", f"{found.raw_bytes} ({human_bytes(found.raw_bytes)})"),
        ("expected", f"{human_bytes(found.stored_bytes)} with the run's codec"),
        ("objects", str(found.objects)),
        ("largest unit", f"{human_bytes(found.largest_unit_bytes)} in each rank's buffers{alone}"),
    ]
    if found.hours is not None:
        bound = f", bound by {found.bound_by}" if found.bound_by else ""
        facts.append(("time", f"{human_seconds(found.hours * 3600)}{bound}"))
    if found.dollars_per_month is not None:
        facts.append(("cost", f"${found.dollars_per_month:.2f} a month"))
    print_facts(facts)
