"""The option `--version` of several programs."""

from typing import Annotated

import typer

from gpuvirt import __version__


def _print_version(desired: bool) -> None:
    if desired:
        print(f"gpuvirt {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]
