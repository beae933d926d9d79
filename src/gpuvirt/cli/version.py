"""The option `--version` of several programs, and `gpuvirt version`, as kubectl's users ask for it."""

from typing import Annotated

import typer

from gpuvirt import __version__


def version() -> None:
    """Print the version."""
    print(f"gpuvirt {__version__}")


def _print_version(desired: bool) -> None:
    if desired:
        version()
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]
