"""Listens for connections, each of which is served by tasks of its own.

Cancelling closes all connections at once: a process that ends waits for no client. asyncio's server would wait for the
tasks of its connections, or (Python 3.11) lose them.
"""

import asyncio
import errno
import os
import ssl
from collections.abc import Callable

from gpuvirt.errors import GpuvirtError

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
