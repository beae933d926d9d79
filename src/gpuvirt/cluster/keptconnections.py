"""Connections to the API server that wait for the next request, so that it costs no handshake.

A connection that waits may have been closed by the server unnoticed. So it is used for a short time only, shorter than
the 90 s after which the API server closes it, and a request on it that gets no answer counts as one whose outcome is
unknown, as on any connection.
"""

import asyncio
from time import monotonic  # noqa: TID251  the ages of connections, which no simulated time changes
from typing import NamedTuple

import h11

MOST_WAITING = 32
WAIT_S = 30.0
"""How long a connection may wait for its next request."""
AGE_S = 120.0
"""How old a connection may get: renewed credentials and other API servers get their turn."""


class KeptConnection(NamedTuple):
    """A connection with the state of its HTTP."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection


class KeptConnections:
    """The connections that wait for a request."""

    def __init__(self) -> None:
        self._waiting: list[tuple[KeptConnection, float]] = []
        """The connections with the times since when they wait; the one that was used last is the last."""
        self._opened_s: dict[asyncio.StreamWriter, float] = {}

    def take(self) -> KeptConnection | None:
        """Return a connection that waits; None where a new one must be opened."""
        now_s = monotonic()
        while self._waiting:
            connection, since_s = self._waiting.pop()
            if now_s - since_s < WAIT_S and not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            self._drop(connection)
        return None

    def keep(self, connection: KeptConnection) -> bool:
        """Keep a connection after its answer; return False for one that cannot have another request."""
        opened_s = self._opened_s.setdefault(connection.writer, monotonic())
        http = connection.http
        is_done = http.our_state is h11.DONE and http.their_state is h11.DONE
        is_usable = is_done and not connection.reader.at_eof() and monotonic() - opened_s < AGE_S
        if not is_usable or len(self._waiting) >= MOST_WAITING:
            self._opened_s.pop(connection.writer, None)
            return False
        http.start_next_cycle()
        self._waiting.append((connection, monotonic()))
        return True

    def close(self) -> None:
        """Close the connections that wait."""
        for connection, _ in self._waiting:
            self._drop(connection)
        self._waiting.clear()

    def _drop(self, connection: KeptConnection) -> None:
        self._opened_s.pop(connection.writer, None)
        connection.writer.transport.abort()
