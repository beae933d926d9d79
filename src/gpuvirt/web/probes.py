"""A small HTTP server for the agent: `/metrics`, `/healthz`, `/readyz`, and nothing else.

It answers GET and HEAD with one response a connection. A web framework would cost the agent 5 MiB for three pages.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 5.0
MOST_REQUEST_BYTES = 8192
MOST_CONNECTIONS = 64

_STATUS_TEXTS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a page says."""

    status: int
    body: str
    content_type: str = "text/plain; charset=utf-8"


Page = Callable[[], Answer]


class Probes:
    """Serves pages."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._open = 0

    async def run(self, host: str, port: int) -> None:
        """Serve at an address for ever; raises OSError when the address can't be had."""
        server = await asyncio.start_server(self._serve, host, port, limit=MOST_REQUEST_BYTES)
        log.info("serving metrics and probes", extra={"address": f"{host or '*'}:{port}"})
        async with server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MOST_CONNECTIONS:
                await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that went away, or that is none
        finally:
            self._open -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(READ_TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
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
            return method, Answer(404, f"no such page; there are {', '.join(self._pages)}\n")
        if method not in {"GET", "HEAD"}:
            return method, Answer(405, "only GET and HEAD\n")
        return method, page()
