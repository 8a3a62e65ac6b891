"""What the verbs share: their common arguments, and how an error becomes a message and a code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.errors import ConfigError, ExitCode, JobError
from store.errors import RunError, StoreError
from store.objects.protocol import ObjectStore

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


def finite(value: float | None) -> float | None:
    """Refuse an option that is no number; a range may let `nan` through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not finite")
    return value


def opened(run_url: str, options: list[str]) -> ObjectStore:
    """Return the store of the run at a path or URL."""
    from store.objects.open import open_store

    return open_store(run_url, parsed(options))


@contextmanager
def kept_run(run_url: str, options: list[str]) -> Iterator[ObjectStore]:
    """Give the store of a run that is there; errors are told as `told` does."""
    from jobs.prepare import read_manifest

    with told():
        objects = opened(run_url, options)
        read_manifest(objects)
        yield objects


def parsed(options: list[str]) -> dict[str, Any]:
    """Return `--option key=value`s as the options of an object store."""
    from jobs.config_file import apply_override

    body: dict[str, Any] = {}
    for option in options:
        apply_override(body, option)
    return body


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values in two columns, long values as they are and nothing behind them."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        typer.echo(f"{name:<{width}}  {value}")


@contextmanager
def told() -> Iterator[None]:
    """Turn the errors that a user can act on into one message and an exit code."""
    try:
        yield
    except JobError as error:
        _fail(error, int(error.exit_code))
    except KeyboardInterrupt as error:
        typer.echo("attnstore: interrupted; run the same command again", err=True)
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from error
    except (RunError, StoreError) as error:
        _fail(error, int(ExitCode.REFUSED))
    except OSError as error:
        if error.filename is None:
            raise  # No file of the user's: a bug, or a pipe whose reader is gone.
        _fail(error, int(ExitCode.REFUSED))


def _fail(error: Exception, code: int) -> None:
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    typer.echo(f"attnstore: {kind}{error}", err=True)
    raise typer.Exit(code) from error
