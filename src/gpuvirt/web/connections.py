"""The connections of an HTTP server: it listens for them, and closes one to make room for another.

Each is served by tasks of its own. Cancelling closes all connections at once: a process that ends waits for no client.
asyncio's server would wait for the tasks of its connections, or (Python 3.11) lose them.

A client that sends half a request, or nothing, keeps no other out: a newcomer, from which no whole request has arrived
yet, makes room for the next one, the oldest newcomer first. A connection that was answered is closed only where too
many others were answered, too. One whose client has a verified certificate is never closed for another. A limit for
each address would not do: behind a node's NAT, the kubelet and pods may share one.
"""

import asyncio
import errno
import os
import ssl
from collections.abc import Callable

import msgspec

from gpuvirt.errors import GpuvirtError

MANY_NEWCOMERS = 256
"""With more connections that were never answered, those that have not sent their request in time are closed."""
MOST_NEWCOMERS = 512
"""The most of them. The computer's limit of open files can be 1,024."""
GRACE_S = 2.0
"""How long a newcomer has for its request while there are not yet the most."""
MOST_ANSWERED = 256
"""The most connections that were answered and wait for their next request."""
MOST_PENDING_BYTES = 64 << 20
"""The most bytes of the incomplete requests of all newcomers, and of all that were answered."""

HANDSHAKE_S = 5.0
"""How long a client may take to negotiate TLS. asyncio's default is a minute, for which silent clients would stay."""


class CannotListenError(GpuvirtError):
    """The process can't listen at an address."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        problem = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        fix = f"; `ss -ltnp 'sport = :{port}'` shows its process" if error.errno == errno.EADDRINUSE else ""
        super().__init__(f"can't listen at {host or '*'}:{port}: {problem}; expected a free address of this host{fix}")


Accept = Callable[[asyncio.TaskGroup, asyncio.StreamReader, asyncio.StreamWriter], None]
"""Starts the tasks of a new connection in a group."""


async def listen(
    address: tuple[str, int],
    accept: Accept,
    started: Callable[[int], None],
    *,
    limit: int,
    context: ssl.SSLContext | None = None,
) -> None:
    """Accept connections until cancelled; raises CannotListenError.

    `started` gets the port once connections are accepted; `limit` is the size of a reader's buffer in bytes.
    """
    ending = False

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if ending:
            writer.transport.abort()
        else:
            accept(group, reader, writer)

    host, port = address
    handshake_s = HANDSHAKE_S if context is not None else None
    try:
        server = await asyncio.start_server(
            connected, host, port, ssl=context, limit=limit, ssl_handshake_timeout=handshake_s, start_serving=False
        )
    except OSError as error:
        raise CannotListenError(host, port, error) from error
    async with asyncio.TaskGroup() as group:
        await server.start_serving()
        started(server.sockets[0].getsockname()[1])
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ending = True
            server.close()


class ServedConnection(msgspec.Struct, eq=False):
    """One connection."""

    close: Callable[[], None]
    """Closes the connection at once."""
    since_s: float = 0.0
    """When it was opened."""
    is_verified: bool = False
    """Whether the client has a verified certificate."""
    is_answered: bool = False
    """Whether a request of the connection was answered."""
    pending_bytes: int = 0
    """The bytes that have arrived of an incomplete request's body."""


class Connections:
    """The open connections of a server."""

    def __init__(self) -> None:
        self.being_answered: set[ServedConnection] = set()
        """Those whose request has arrived, so that they are not closed."""
        self._newcomers: dict[ServedConnection, None] = {}
        """Those without a certificate from which no whole request has arrived yet, the oldest first."""
        self._answered: dict[ServedConnection, None] = {}
        """Those without a certificate that wait for their next request, the one that waits longest first."""

    def add(self, connection: ServedConnection, now_s: float) -> None:
        """Add a new connection, and close newcomers if there are too many; at the worst, this one."""
        if connection.is_verified:
            return
        self._newcomers[connection] = None
        first = sum(not (other.is_answered or other.is_verified) for other in self.being_answered)
        while (count := len(self._newcomers) + first) > MANY_NEWCOMERS and self._newcomers:
            oldest = next(iter(self._newcomers))
            if count <= MOST_NEWCOMERS and now_s - oldest.since_s < GRACE_S:
                break
            self._close(oldest)

    def received(self, connection: ServedConnection, count: int) -> None:
        """Count bytes of a body; of connections with too many in all, close the one with the most."""
        connection.pending_bytes += count
        others = self._newcomers if connection in self._newcomers else self._answered
        if sum(other.pending_bytes for other in others) > MOST_PENDING_BYTES:
            self._close(max(others, key=lambda other: other.pending_bytes))

    def begin(self, connection: ServedConnection) -> None:
        """Note that a whole request has arrived."""
        self.remove(connection)
        self.being_answered.add(connection)

    def answered(self, connection: ServedConnection) -> None:
        """Note that a request was answered; if too many connections wait, close the one that waits longest."""
        self.remove(connection)
        connection.is_answered = True
        if connection.is_verified:
            return
        self._answered[connection] = None
        if len(self._answered) > MOST_ANSWERED:
            self._close(next(iter(self._answered)))

    def remove(self, connection: ServedConnection) -> None:
        """Forget a connection that has ended."""
        connection.pending_bytes = 0
        self.being_answered.discard(connection)
        self._newcomers.pop(connection, None)
        self._answered.pop(connection, None)

    def _close(self, connection: ServedConnection) -> None:
        self.remove(connection)
        connection.close()
