"""The ``eyas`` command itself, to which the other files of this folder add theirs."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas import __version__

app = typer.Typer(
    name="eyas",
    help="Decode causal language models faster, with exactly their own output (EAGLE-2).",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
INTERRUPTED = 130


@app.callback()
def start(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False
) -> None:
    """Decode causal language models faster, with exactly their own output (EAGLE-2)."""
    if version:
        print(f"eyas {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
