"""The ``cnr`` program: its commands by name, and the call of one."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from cnr_store_tools.commands import (
    checks,
    demonstration,
    following,
    maintenance,
    names,
    relaying,
    reporting,
    stores,
    transfer,
)
from cnr_store_tools.exits import GuardedGroup

app = typer.Typer(
    cls=GuardedGroup,
    name="cnr",
    help="Create, inspect, check, repair, export, import, name, copy and maintain stores of sparse, quantized "
    "checkpoints.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(stores.init)
app.command()(stores.log)
app.command()(stores.show)
app.command()(stores.diff)
app.command()(reporting.report)
app.command()(checks.verify)
app.command()(checks.repair)
app.command()(transfer.export)
app.command("import")(transfer.import_)
app.command()(transfer.copy)
app.command()(transfer.promote)
app.command("tags")(names.list_tags)
app.command()(names.tag)
app.command()(names.untag)
app.command("channels")(names.list_channels)
app.command()(names.channel)
app.command()(names.rollback)
app.command()(names.fork)
app.command("branches")(names.list_branches)
app.command("drop-branch")(names.drop_branch)
app.command()(following.changes)
app.command()(names.cursors)
app.command("drop-cursor")(names.drop_cursor)
app.command()(relaying.relay)
app.command()(maintenance.compact)
app.command()(maintenance.gc)
app.command("maintain")(maintenance.maintain_)
app.command()(maintenance.metrics)
app.command()(demonstration.demo)
app.command()(stores.version)


@app.callback(invoke_without_command=True)
def _without_command(
    context: typer.Context,
    print_version: Annotated[bool, typer.Option("--version", help="Print the versions, and exit.")] = False,
    verbose: Annotated[  # noqa: ARG001 - likewise
        bool, typer.Option("--verbose", "-v", help="Print what the library logs; for every command.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors; for every command.")] = False,  # noqa: ARG001 - `GuardedGroup` removes it from the arguments
) -> None:
    if print_version:
        stores.version()
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line of this process and exit."""
    warnings.formatwarning = lambda message, *_args, **_kwargs: f"warning: {message}\n"
    app()
