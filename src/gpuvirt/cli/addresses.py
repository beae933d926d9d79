"""Addresses to serve at, as options name them."""

import os
from typing import Annotated

import typer

from gpuvirt.errors import ConfigError

LISTEN = ":9410"
LISTEN_VARIABLE = "GPUVIRT_LISTEN"


def _listen() -> str:
    """Return where to serve when nothing says where; an empty variable, which Click takes for none, says nowhere."""
    return "" if os.environ.get(LISTEN_VARIABLE) == "" else LISTEN  # noqa: TID251  Click does not hand it on


ListenOption = Annotated[
    str,
    typer.Option(
        envvar=LISTEN_VARIABLE,
        metavar="ADDRESS:PORT",
        default_factory=_listen,
        show_default=LISTEN,
        help="Where to serve metrics and probes; '' for nowhere.",
    ),
]
"""For what runs on each node."""


def address_of(text: str) -> tuple[str, int] | None:
    """Return the address in `host:port`, `:port` or `[::1]:port`; None for an empty text. Raises ConfigError."""
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"expected ADDRESS:PORT, as in :9410 or 127.0.0.1:9410, got {text!r}", where="--listen")
    return host.strip("[]"), int(port)
