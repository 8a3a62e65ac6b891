"""The `attnstore` command: thin verbs over what the packages do, and nothing of their own.

Ray, torch and vLLM are imported only inside the verbs that start workers, so that an analyst's
install without them has every other verb. Exit codes: 0 done; 2 refused or stopped (also: problems
found by `verify`); 3 done but some prompts failed; 75 interrupted, run again.
"""

from __future__ import annotations

import typer

from jobs import cli_keep, cli_read, cli_run

app = typer.Typer(
    name="attnstore",
    help="Capture transformer attention, store it durably, read any slice of it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(cli_run.run)
app.command()(cli_run.submit)
app.command()(cli_run.manifest)
app.command()(cli_keep.status)
app.command(name="ls")(cli_keep.list_prompts)
app.command()(cli_keep.verify)
app.command()(cli_keep.gc)
app.command()(cli_read.show)
app.command()(cli_read.query)
app.command()(cli_read.export)

if __name__ == "__main__":
    app()
