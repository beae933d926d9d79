"""A small HTTP server for the pages `/metrics`, `/healthz` and `/readyz`.

It answers GET and HEAD, with one response for each connection. A web framework would cost the agent 5 MiB.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuvirt.web.listening import listen

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 1.0
"""How long a client may take to send its request; the kubelet sends it with the connection."""
ANSWER_TIMEOUT_S = 30.0
MOST_REQUEST_BYTES = 8192
MOST_CONNECTIONS = 64
"""With more connections, the oldest one without a request is closed, else the oldest: the kubelet's probe gets in."""
TURNS_TO_READ = 4
"""Turns of the event loop after which a request that arrived with its connection has been read: one to watch the
socket, one to read it, one to wake the reader, and one to spare. The loop accepts up to a hundred clients in a turn."""

_STATUS_TEXTS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of a page."""

    status: int
    body: str
    content_type: str = "text/plain; charset=utf-8"


Page = Callable[[], Answer]


class Probes:
    """Serves pages over HTTP."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self.port: int | None = None
        """The port of the server; None before it listens."""
        self._pages = pages
        self._silent: dict[asyncio.StreamWriter, None] = {}
        """Connections without a request so far, the oldest first."""
        self._answered: dict[asyncio.StreamWriter, None] = {}
        """Connections whose answer is being sent, the oldest first."""

    async def run(self, host: str, port: int) -> None:
        """Serve at an address until cancelled; raises CannotListenError."""

        def started(port: int) -> None:
            self.port = port
            log.info("serving metrics and probes", extra={"address": f"{host or '*'}:{port}"})

        await listen((host, port), self._accept, started, limit=MOST_REQUEST_BYTES)

    def _accept(self, group: asyncio.TaskGroup, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        group.create_task(self._serve(reader, writer))
        group.create_task(self._make_room())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._silent[writer] = None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._answer(reader, writer)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has closed the connection, does not read, or does not speak HTTP
        except Exception:
            log.exception("a metrics or probe page failed")  # only this response fails: probes use the other pages
        finally:
            self._silent.pop(writer, None)
            self._answered.pop(writer, None)
            writer.transport.abort()

    async def _make_room(self) -> None:
        """Close a connection where there are too many, once the request of the newest one could be read."""
        for _ in range(TURNS_TO_READ):
            await asyncio.sleep(0)  # noqa: TID251  a turn of the event loop, and no time
        if len(self._silent) + len(self._answered) > MOST_CONNECTIONS:
            connections = self._silent or self._answered
            oldest = next(iter(connections))
            del connections[oldest]
            oldest.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(READ_TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
        if self._silent.pop(writer, writer) is None:
            self._answered[writer] = None
        method, answer = self.respond(head.split(b"\r\n", 1)[0].decode("latin-1"))
        body = answer.body.encode()
        writer.write(
            f"HTTP/1.1 {answer.status} {_STATUS_TEXTS[answer.status]}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        )
        if method != "HEAD":
            writer.write(body)
        await writer.drain()

    def respond(self, request_line: str) -> tuple[str, Answer]:
        """Return the method and the answer for a request's first line."""
        parts = request_line.split(" ")
        if len(parts) != 3:
            return "", Answer(400, "expected a request line: GET /path HTTP/1.1\n")
        method, target, _version = parts
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return method, Answer(404, f"no such page; pages are {', '.join(self._pages)}\n")
        if method not in {"GET", "HEAD"}:
            return method, Answer(405, "only GET and HEAD are supported\n")
        return method, page()
