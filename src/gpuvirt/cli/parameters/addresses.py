"""The addresses of metrics and probes, in the option --listen."""

import os
from typing import Annotated

import typer

from gpuvirt.errors import ConfigError

LISTEN = ":9410"
LISTEN_VARIABLE = "GPUVIRT_LISTEN"


def _listen() -> str:
    """Return the default of --listen: nothing where the variable is set and empty, which Click treats as unset."""
    return "" if os.environ.get(LISTEN_VARIABLE) == "" else LISTEN  # noqa: TID251  Click hides an empty variable


ListenOption = Annotated[
    str,
    typer.Option(
        envvar=LISTEN_VARIABLE,
        metavar="ADDRESS:PORT",
        default_factory=_listen,
        show_default=LISTEN,
        help="Address of metrics and probes; '' serves none.",
    ),
]
"""The option of the processes that run on each node."""


def address_of(text: str) -> tuple[str, int] | None:
    """Return the address in `host:port`, `:port` or `[::1]:port`; None for an empty text. Raises ConfigError."""
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"expected ADDRESS:PORT, as in :9410 or 127.0.0.1:9410, got {text!r}", where="--listen")
    return host.strip("[]"), int(port)
