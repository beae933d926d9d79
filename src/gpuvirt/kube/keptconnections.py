"""Connections to the API server that wait for the next request, so that it costs no handshake.

A connection that waits may have been closed by the server, or have died in a partition. So it waits for a short time
only, shorter than the 90 s after which the API server closes it, and the kernel is asked before it is used. Once one
connection gets no answer, all that wait are closed: no second request then waits for a dead one.
"""

import asyncio
from collections.abc import AsyncGenerator
from time import monotonic  # noqa: TID251  the ages of connections, which no simulated time changes

from gpuvirt.kube.access.credentials import TlsIdentity
from gpuvirt.kube.connection import Connection

MOST_WAITING = 32
WAIT_S = 30.0
"""How long a connection may wait for its next request; then it is closed, so that an idle agent has only its watches'.
"""
AGE_S = 600.0
"""How old a connection may get, so that other API servers get their turn. Renewed certificates end it at once."""


class KeptConnections:
    """The connections that wait for a request, all of one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Connection, float]] = []
        """The connections with the times since when they wait; the one that was used last is the last."""
        self._expiry: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: AsyncGenerator[None, None] | None = None

    async def belong(self) -> None:
        """Close the connections when the running event loop ends; those of an earlier loop are already closed.

        A loop that ends closes its asynchronous generators: so the commands need not end their clients.
        """
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._expiry, self._end = asyncio.get_running_loop(), None, self._closed_at_end()
            self._waiting.clear()
            await anext(self._end)

    async def _closed_at_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.close()

    def take(self, identity: TlsIdentity) -> Connection | None:
        """Return a connection with this identity; None where a new one must be opened. Others are closed."""
        while self._waiting:
            connection, since_s = self._waiting.pop()
            is_current = connection.identity == identity and monotonic() - since_s < WAIT_S
            if is_current and connection.is_quiet():
                return connection
            connection.end()
        return None

    def keep(self, connection: Connection) -> bool:
        """Keep a connection after its answer; return False for one that cannot have another request."""
        is_usable = connection.is_done and monotonic() - connection.opened_s < AGE_S
        if not is_usable or len(self._waiting) >= MOST_WAITING:
            return False
        self._waiting.append((connection, monotonic()))
        self._expire_later()
        return True

    def close(self) -> None:
        """Close the connections that wait."""
        waiting, self._waiting = self._waiting, []
        for connection, _ in waiting:
            connection.end()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _expire_later(self) -> None:
        if self._expiry is None and self._loop is not None and self._waiting:
            left_s = self._waiting[0][1] + WAIT_S - monotonic()
            self._expiry = self._loop.call_later(max(left_s, 0.0), self._expire)

    def _expire(self) -> None:
        """Close the connections that have waited for too long."""
        self._expiry = None
        now_s = monotonic()
        expired = [connection for connection, since_s in self._waiting if now_s - since_s >= WAIT_S]
        self._waiting = [(connection, since_s) for connection, since_s in self._waiting if now_s - since_s < WAIT_S]
        for connection in expired:
            connection.end()
        self._expire_later()
