"""One connection to the API server with the state of its HTTP (h11): sends a request, reads its answer, ends.

While a watch is quiet, TCP keepalive detects a dead API server within a minute.

A connection whose request is given up is reset: a connection that is closed otherwise delivers, after a network
partition, what the kernel still has to send. The kernel itself gives up after the same time, since a process that is
stopped cannot reset anything.
"""

import asyncio
import select
import socket
import ssl
import struct
from asyncio.trsock import TransportSocket
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic  # noqa: TID251  the ages of connections, which no simulated time changes

import h11

from gpuvirt.cluster.access.credentials import Credentials, Streams, TlsIdentity

READ_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: a connection that is closed is reset, and the kernel sends nothing of it any more."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


@dataclass(slots=True, eq=False)
class Connection:
    """An open connection. Each method raises OSError, ValueError and h11.ProtocolError when it is broken."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    tcp: TransportSocket
    """The socket; the writer forgets it once the connection has ended."""
    identity: TlsIdentity
    http: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    opened_s: float = field(default_factory=monotonic)
    is_answered: bool = False
    """Whether the current request has got any byte of an answer."""

    @property
    def is_done(self) -> bool:
        """Whether the request was answered completely, and the connection may have another one."""
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE and not self.reader.at_eof()

    def is_quiet(self) -> bool:
        """Return whether the server has sent and closed nothing since the answer; asks the kernel.

        The event loop may not have seen yet what has arrived, such as after the process was stopped.
        """
        if self.reader.at_eof() or self.writer.is_closing():
            return False
        poll = select.poll()
        poll.register(self.tcp.fileno(), select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def limit(self, within_s: float) -> None:
        """Have the kernel give up what it cannot deliver within a time."""
        self.tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(within_s * 1000))

    async def send(self, head: h11.Request, body: bytes) -> None:
        """Send a request; the connection must have none under way."""
        if self.http.our_state is h11.DONE:
            self.http.start_next_cycle()
        self.is_answered = False
        encoded = (self.http.send(head) or b"") + (self.http.send(h11.Data(data=body)) or b"" if body else b"")
        self.writer.write(encoded + (self.http.send(h11.EndOfMessage()) or b""))
        await self.writer.drain()

    async def answer(self) -> h11.Response:
        """Return the head of the answer."""
        event = await self.next_event()
        if not isinstance(event, h11.Response):
            raise h11.RemoteProtocolError(f"expected an answer, got {type(event).__name__}")
        return event

    async def next_event(self) -> h11.Event:
        """Return the next event of the answer."""
        while True:
            event = self.http.next_event()
            if isinstance(event, h11.Event) and not isinstance(event, h11.InformationalResponse):
                return event
            if event is h11.PAUSED:
                raise h11.RemoteProtocolError("the server sent data after the end of its answer")
            if event is h11.NEED_DATA:
                data = await self.reader.read(READ_BYTES)
                self.is_answered = self.is_answered or bool(data)
                self.http.receive_data(data)

    def end(self) -> None:
        """Close the connection; reset it if its request was not answered completely."""
        if self.http.their_state not in {h11.DONE, h11.MUST_CLOSE, h11.CLOSED}:
            self.reset()
        else:
            self.writer.transport.abort()

    def reset(self) -> None:
        """Close the connection so that the kernel sends nothing of it any more."""
        with suppress(OSError):
            self.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.writer.transport.abort()


async def opened(credentials: Credentials, identity: TlsIdentity, context: ssl.SSLContext) -> Connection:
    """Return a new connection to the API server. Raises OSError and ValueError."""
    reader, writer = await _streams(credentials, context)
    tcp: TransportSocket = writer.get_extra_info("socket")
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        tcp.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(reader, writer, tcp, identity)


async def _streams(credentials: Credentials, context: ssl.SSLContext) -> Streams:
    host, port = credentials.host, credentials.port
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
