"""The option --watch: prints a list of the cluster, and again after each change."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Annotated, TypeVar

import typer

from gpuvirt.cli.formats import ListFormat
from gpuvirt.cli.output.tables import CLEAR
from gpuvirt.clock import RealClock
from gpuvirt.kube.failures import UnreachableError

T = TypeVar("T")
EVERY_S = 2.0
"""How often the API server is asked."""
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Show each change until interrupted.")]


def print_read(
    read: Callable[[], Coroutine[None, None, T]], show: Callable[[T], None], listing: ListFormat, *, watch: bool
) -> None:
    """Show a list, with `watch` again after each change until interrupted; raise what `read` raises."""
    if not watch:
        show(asyncio.run(read()))
        return
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(read, show, listing))


async def _watch(read: Callable[[], Coroutine[None, None, T]], show: Callable[[T], None], listing: ListFormat) -> None:
    clock, shown = RealClock(), list[T]()
    while True:
        try:
            found = [await read()]
        except UnreachableError as error:
            print(f"gpuvirt: {error}", file=sys.stderr)
            found = shown
        if found != shown:
            if listing.is_table and sys.stdout.isatty():
                print(CLEAR, end="")
            show(found[0])
            sys.stdout.flush()
            shown = found
        await clock.sleep(EVERY_S)
