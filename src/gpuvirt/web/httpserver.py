"""An HTTP/1.1 server for a few clients, some of which keep their connections and send large JSON (h11, asyncio).

kube-scheduler is such a client, the kubelet's probes and Prometheus are others. A web framework with a parser in C
answers the extender's requests no faster, since nearly all of the time goes into the request's own work, and costs the
agent 5 MiB.
"""

import asyncio
import errno
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus

import h11
import msgspec

from gpuvirt.clock import Clock, RealClock
from gpuvirt.errors import GpuvirtError
from gpuvirt.web.certificates import UNKNOWN, ClientRules, ClientStanding, ServedClient

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

    Cancelling closes all connections at once: a process that ends waits for no client. asyncio's server would wait for
    the tasks of its connections, or (Python 3.11) lose them.

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
    """The open connections of a server, one of which is closed to make room for another.

    A client that sends half a request, or nothing, keeps no other out: a newcomer, from which no whole request has
    arrived yet, makes room for the next one, the oldest newcomer first. A connection that was answered is closed only
    where too many others were answered, too. One whose client has a verified certificate is never closed for another.
    """

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


log = logging.getLogger(__name__)

MOST_BODY_BYTES = 32 << 20
"""The most bytes of a request's body: 5,000 whole nodes have some 20 MB."""
IDLE_S = 120.0
"""How long a connection may be silent between requests. Go's clients close theirs after 90 s, so that the server seldom
closes one that a client is about to use."""
REQUEST_S = 30.0
CLOSE_S = 2.0
"""How long a client may take to read the rest and to close its side, too."""
READ_BYTES = 1 << 18


class HttpRequest(msgspec.Struct, frozen=True):
    """One request."""

    method: str
    path: str
    """The target without its query."""
    content_type: str = ""
    """The media type in lower case, without parameters."""
    body: bytes = b""
    fault: str = ""
    """The error of a body that exceeds the limit, which is not read."""
    client: ServedClient = UNKNOWN


class HttpAnswer(msgspec.Struct, frozen=True):
    """The answer to a request."""

    status: int
    body: bytes
    content_type: str = "application/json"
    closes: bool = False
    """Whether the connection ends with the answer, so that the client's next request may reach another server."""
    allow: str = ""
    """The methods that the path has, for an answer 405."""


Handler = Callable[[HttpRequest], Awaitable[HttpAnswer]]


class _ConnectionEndedError(Exception):
    """The client has closed the connection between two requests."""


class HttpServer:
    """Serves requests by one handler."""

    def __init__(
        self,
        handler: Handler,
        clock: Clock | None = None,
        clients: ClientRules | None = None,
        *,
        request_s: float = REQUEST_S,
        most_body_bytes: int | None = None,
    ) -> None:
        """`clients` are the certificates that clients need.

        `request_s` is how long a request may take to arrive, and an answer to be read. `most_body_bytes` is the size of
        the largest body, MOST_BODY_BYTES by default.
        """
        self.port: int | None = None
        """The port of the server; None before it listens."""
        self.connections = Connections()
        self._handler = handler
        self._clock = clock or RealClock()
        self._clients = clients
        self._request_s = request_s
        self._most_body_bytes = most_body_bytes

    async def run(
        self, host: str, port: int, context: ssl.SSLContext | None = None, *, about: str = "requests"
    ) -> None:
        """Serve at an address until cancelled; raises CannotListenError. `about` says in the log what is served."""

        def started(port: int) -> None:
            self.port = port
            log.info("serving %s", about, extra={"address": f"{host or '*'}:{port}", "tls": context is not None})

        def accept(group: asyncio.TaskGroup, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            group.create_task(self._serve(reader, writer))

        await listen((host, port), accept, started, limit=READ_BYTES, context=context)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        now_s = self._clock.monotonic_s()
        known = self._clients.judge(writer.get_extra_info("peercert")) if self._clients is not None else UNKNOWN
        is_verified = known.standing is ClientStanding.PERMITTED
        connection = ServedConnection(writer.transport.abort, now_s, is_verified=is_verified)
        self.connections.add(connection, now_s)
        try:
            received = partial(self.connections.received, connection)
            http = h11.Connection(h11.SERVER)
            most = MOST_BODY_BYTES if self._most_body_bytes is None else self._most_body_bytes
            stream = _Stream(http, reader, writer, known, received, most)
            while await self._answer(stream, connection):
                stream.http.start_next_cycle()
            self.connections.remove(connection)
            writer.close()
            async with asyncio.timeout(CLOSE_S):
                await writer.wait_closed()
        except (TimeoutError, OSError, h11.LocalProtocolError, _ConnectionEndedError):
            pass  # the client has closed the connection, or does not send or read
        except Exception:
            log.exception("a request failed")
        finally:
            self.connections.remove(connection)
            writer.transport.abort()

    async def _answer(self, stream: "_Stream", connection: ServedConnection) -> bool:
        """Answer one request; return whether the connection goes on."""
        http = stream.http
        try:
            async with asyncio.timeout(IDLE_S):
                head = await stream.next()
            if not isinstance(head, h11.Request):
                raise _ConnectionEndedError
            async with asyncio.timeout(self._request_s):
                request = await stream.request(head)
        except h11.RemoteProtocolError as error:
            await stream.send(HttpAnswer(400, f"{error}\n".encode(), "text/plain", closes=True), "GET")
            return False
        self.connections.begin(connection)
        answer = await self._handler(request)
        async with asyncio.timeout(self._request_s):
            await stream.send(answer, request.method)
        goes_on = http.our_state is h11.DONE and http.their_state is h11.DONE and not answer.closes
        if goes_on:
            self.connections.answered(connection)
        return goes_on


class _Stream(msgspec.Struct, frozen=True):
    """The requests and answers of one connection."""

    http: h11.Connection
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    client: ServedClient
    received: Callable[[int], None]
    """Gets the numbers of bytes of a body that arrive."""
    most_body_bytes: int

    async def next(self) -> h11.Event:
        """Return the next event of a request; raise h11.RemoteProtocolError for what is not HTTP, or a torn body."""
        http = self.http
        while True:
            event = http.next_event()
            if isinstance(event, h11.Event):
                return event
            if event is h11.PAUSED:
                raise h11.RemoteProtocolError("data after the end of the connection")
            if http.they_are_waiting_for_100_continue:
                self.writer.write(http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            http.receive_data(await self.reader.read(READ_BYTES))

    async def request(self, head: h11.Request) -> HttpRequest:
        """Return a request whose head has arrived."""
        headers = {name: value.decode("latin-1") for name, value in head.headers}
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        method, path = head.method.decode("latin-1"), head.target.decode("latin-1").partition("?")[0]
        parts: list[bytes] = []
        size = int(headers.get(b"content-length", "0"))
        while size <= self.most_body_bytes:
            event = await self.next()
            if isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                self.received(len(parts[-1]))
                size = max(size, sum(map(len, parts)) if b"content-length" not in headers else 0)
            else:
                return HttpRequest(method, path, kind, b"".join(parts), client=self.client)
        fault = f"the body is larger than {self.most_body_bytes >> 20} MiB"
        return HttpRequest(method, path, kind, fault=fault, client=self.client)

    async def send(self, answer: HttpAnswer, method: str) -> None:
        """Send an answer to a request of a method."""
        http, writer = self.http, self.writer
        if http.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return
        headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body)))]
        if answer.closes:
            headers.append(("Connection", "close"))
        if answer.allow:
            headers.append(("Allow", answer.allow))
        reason = HTTPStatus(answer.status).phrase.encode()
        writer.write(http.send(h11.Response(status_code=answer.status, headers=headers, reason=reason)) or b"")
        if method != "HEAD":
            writer.write(http.send(h11.Data(data=answer.body)) or b"")
        writer.write(http.send(h11.EndOfMessage()) or b"")
        await writer.drain()
