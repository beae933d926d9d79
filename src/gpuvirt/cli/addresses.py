"""Addresses to serve at, as options name them."""

from gpuvirt.errors import ConfigError


def address_of(text: str) -> tuple[str, int] | None:
    """Return the address in `host:port`, `:port` or `[::1]:port`; None for an empty text. Raises ConfigError."""
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"expected ADDRESS:PORT, as in :9410 or 127.0.0.1:9410, got {text!r}", where="--listen")
    return host.strip("[]"), int(port)
