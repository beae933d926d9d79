"""HTTP servers that serve at a free port for the duration of a context."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gpuvirt.clock import RealClock
from gpuvirt.web.httpserver import HttpServer


@asynccontextmanager
async def serving(server: HttpServer, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serve, and return the port; with TLS where there is a context for it."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.run("127.0.0.1", 0, context))
        while server.port is None:
            await RealClock().sleep(0.01)
        yield server.port
        running.cancel()
