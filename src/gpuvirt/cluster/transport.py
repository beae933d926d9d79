"""HTTPS requests to the API server by h11; each wait has a limit.

A connection for each request costs a handshake (5 ms), and avoids connections that have died unnoticed. Only watches
last long. While a watch is quiet, TCP keepalive detects a dead API server within a minute. A client that writes
hundreds of times a second keeps its connections for the next requests (`keptconnections`).

A connection whose request is given up is reset: a connection that is closed otherwise delivers, after a network
partition, what the kernel still has to send. The kernel itself gives up after the same time, since a process that is
stopped cannot reset anything.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import h11

from gpuvirt import __version__
from gpuvirt.cluster.access.credentials import Credentials, Streams
from gpuvirt.cluster.access.proxies import authority
from gpuvirt.cluster.failures import NotSentError, NotUnderstoodError, UnreachableError
from gpuvirt.cluster.keptconnections import KeptConnection, KeptConnections

CONNECT_S = 10.0
ANSWER_S = 30.0
"""The longest time until an answer begins, and between two parts of an answer that is not a watch."""
READ_BYTES = 1 << 16
UNAUTHORIZED = 401
MOST_BYTES = 32 << 20
"""The most bytes of an answer or a line of a watch. A page of 500 nodes with all their images has a third of that."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: a connection that is closed is reset, and the kernel sends nothing of it any more."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True, slots=True)
class Request:
    """A request; `target` is path and query."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    may_send: Callable[[], bool] | None = None
    """Asked when the connection is there, right before the request is sent."""
    within_s: float = ANSWER_S
    """How long the kernel tries to deliver the request."""


class Answer:
    """An answer whose status and headers have arrived."""

    def __init__(self, status: int, headers: Mapping[str, str], parts: AsyncIterator[bytes]) -> None:
        """The names of `headers` are in lower case."""
        self.status = status
        self.headers = headers
        self.parts = parts
        """The parts of the body as they arrive; raises UnreachableError if the connection breaks."""

    async def body(self) -> bytes:
        """Return the whole body; raises UnreachableError, and NotUnderstoodError if it is too long."""
        found = bytearray()
        async for part in self.parts:
            found += part
            if len(found) > MOST_BYTES:
                raise NotUnderstoodError(f"the answer is longer than {MOST_BYTES >> 20} MiB; ask for smaller pages")
        return bytes(found)


class Transport:
    """Sends HTTPS requests to one API server."""

    def __init__(self, credentials: Credentials, *, keeps: bool = False) -> None:
        """With `keeps`, connections are kept for the next requests; not with a credential plugin."""
        self.credentials = credentials
        self._kept = KeptConnections() if keeps and credentials.plugin is None else None
        self._where = f"https://{credentials.host}:{credentials.port}"

    def close(self) -> None:
        """Close the connections that wait for a request."""
        if self._kept is not None:
            self._kept.close()

    @asynccontextmanager
    async def ask(self, request: Request, *, quiet_s: float = ANSWER_S) -> AsyncIterator[Answer]:
        """Send a request and yield its answer; the connection ends with the context. Raises UnreachableError.

        With a credential plugin, raises CredentialsError. If the server rejects the plugin's credentials, the request
        is sent once more with new ones.
        `quiet_s` is the longest time between two parts of the body.
        """
        plugin = self.credentials.plugin
        if plugin is None:
            async with self._ask(self.credentials, request, quiet_s) as answer:
                yield answer
            return
        issued = await plugin.credentials()
        async with self._ask(self.credentials.with_issued(issued), request, quiet_s) as answer:
            if answer.status != UNAUTHORIZED:
                yield answer
                return
        plugin.reject(issued)
        async with self._ask(self.credentials.with_issued(await plugin.credentials()), request, quiet_s) as answer:
            yield answer

    @asynccontextmanager
    async def _ask(self, credentials: Credentials, request: Request, quiet_s: float) -> AsyncIterator[Answer]:
        kept = self._kept.take() if self._kept is not None else None
        reader, writer, http = kept or (*await self._connect(credentials), h11.Connection(h11.CLIENT))
        try:
            if request.may_send is not None and not request.may_send():
                raise NotSentError(
                    f"{request.method} {request.target}: not sent, since this process may no longer write"
                )
            with self._broken():
                _limit(writer, request.within_s)
                async with asyncio.timeout(ANSWER_S):
                    writer.write(_head(credentials, http, request, keeps=self._kept is not None))
                    await writer.drain()
                    head = await _next(http, reader)
            if not isinstance(head, h11.Response):
                raise UnreachableError(f"{self._where}: expected an answer, got {type(head).__name__}")
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
            yield Answer(head.status_code, headers, self._parts(http, reader, quiet_s))
        finally:
            if self._kept is None or not self._kept.keep(KeptConnection(reader, writer, http)):
                _end(writer, http)

    async def _connect(self, credentials: Credentials) -> Streams:
        try:
            with self._broken():
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await _opened(credentials)
        except UnreachableError as error:
            raise NotSentError(str(error)) from error
        tcp = writer.get_extra_info("socket")
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            tcp.setsockopt(socket.IPPROTO_TCP, option, value)
        return reader, writer

    async def _parts(self, http: h11.Connection, reader: asyncio.StreamReader, quiet_s: float) -> AsyncIterator[bytes]:
        while True:
            with self._broken():
                async with asyncio.timeout(quiet_s):
                    event = await _next(http, reader)
            if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    @contextmanager
    def _broken(self) -> Iterator[None]:
        """Turn the errors of a broken connection into UnreachableError."""
        try:
            yield
        except TimeoutError as error:
            raise UnreachableError(f"{self._where}: the API server did not answer in time") from error
        except (OSError, ValueError, h11.ProtocolError) as error:
            raise UnreachableError(f"{self._where}: {str(error) or type(error).__name__}") from error


def _limit(writer: asyncio.StreamWriter, within_s: float) -> None:
    """Have the kernel give up what it cannot deliver within a time; raises OSError."""
    tcp = writer.get_extra_info("socket")
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(within_s * 1000))


def _end(writer: asyncio.StreamWriter, http: h11.Connection) -> None:
    """Close a connection; reset it if its request was not answered completely."""
    if http.their_state not in {h11.DONE, h11.MUST_CLOSE, h11.CLOSED}:
        with suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def _opened(credentials: Credentials) -> Streams:
    """Return a connection to the API server. Raises OSError and ValueError."""
    host, port, context = credentials.host, credentials.port, credentials.context()
    name = credentials.server_name or host
    if credentials.tunnel is None:
        return await asyncio.open_connection(host, port, ssl=context, server_hostname=name, limit=READ_BYTES)
    reader, writer = await credentials.tunnel.open(host, port)
    try:
        await writer.start_tls(context, server_hostname=name)
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


def _head(credentials: Credentials, http: h11.Connection, request: Request, *, keeps: bool) -> bytes:
    """Return the encoded request. Raises OSError if the token can't be read."""
    headers = {
        "Host": authority(credentials.host, credentials.port),
        "User-Agent": f"gpuvirt/{__version__}",
        "Accept": "application/json",
        **({} if keeps else {"Connection": "close"}),
        **request.headers,
    }
    if (authorization := credentials.authorization()) is not None:
        headers["Authorization"] = authorization
    if request.body:
        headers["Content-Length"] = str(len(request.body))
    target = credentials.path + request.target
    sent = [*headers.items(), *credentials.headers]
    head = http.send(h11.Request(method=request.method, target=target, headers=sent))
    body = http.send(h11.Data(data=request.body)) if request.body else b""
    return (head or b"") + (body or b"") + (http.send(h11.EndOfMessage()) or b"")


async def _next(http: h11.Connection, reader: asyncio.StreamReader) -> h11.Event:
    """Return the next event of the answer."""
    while True:
        event = http.next_event()
        if isinstance(event, h11.Event) and not isinstance(event, h11.InformationalResponse):
            return event
        if event is h11.PAUSED:
            raise h11.RemoteProtocolError("the server sent data after the end of its answer")
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(READ_BYTES))


class Lines:
    """Splits a stream of bytes into lines."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._begun: list[bytes] = []
        self._length = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the lines that `piece` completes, without line ends and empty lines.

        Raises NotUnderstoodError if a line is longer than `most_bytes`.
        """
        *whole, rest = piece.split(b"\n")
        for end in whole:
            line = b"".join((*self._begun, end))
            self._begun, self._length = [], 0
            if line.strip():
                yield line
        self._begun.append(rest)
        self._length += len(rest)
        if self._length > self._most_bytes:
            raise NotUnderstoodError(f"a line is longer than {self._most_bytes} bytes")
