"""One connection to the API server with the state of its HTTP (h11): sends a request, reads its answer, ends.

While a watch is quiet, TCP keepalive detects a dead API server within a minute.

A connection whose request is given up is reset: a connection that is closed otherwise delivers, after a network
partition, what the kernel still has to send. The kernel itself gives up after the same time, since a process that is
stopped cannot reset anything. Therefore HTTP/1.1: with HTTP/2 the cancellation of a write waits behind it in the same
queue, and a reset would end the watches, too.

A stream of small pieces, as the events of a watch, may gather in the kernel before it is read: each read costs a turn
of the event loop, which is ten times as much as a piece in a larger read.
"""

import asyncio
import select
import socket
import ssl
import struct
from asyncio.trsock import TransportSocket
from contextlib import suppress
from time import monotonic  # noqa: TID251  the ages of connections, which no simulated time changes
from typing import cast

import h11
import msgspec

from gpuvirt.clock import RealClock
from gpuvirt.kube.access.credentials import Credentials, Streams, TlsIdentity

READ_BYTES = 1 << 16
MOST_READ_BYTES = 1 << 20
"""The most bytes of one read: all that has arrived."""
MUCH_BYTES = 192 << 10
"""A read of so much leaves more in the kernel: the event loop takes 256 KiB at once from it."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: a connection that is closed is reset, and the kernel sends nothing of it any more."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class Connection(msgspec.Struct, eq=False):
    """An open connection. Each method raises OSError, ValueError and h11.ProtocolError when it is broken."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    below: asyncio.Transport
    """The transport under that of TLS. While it is paused, what arrives stays in the kernel and costs nothing."""
    tcp: TransportSocket
    """The socket; the writer forgets it once the connection has ended."""
    identity: TlsIdentity
    http: h11.Connection = msgspec.field(default_factory=lambda: h11.Connection(h11.CLIENT))
    opened_s: float = msgspec.field(default_factory=monotonic)
    is_answered: bool = False
    """Whether the current request has got any byte of an answer."""
    _streams: bool = False
    """Whether the answer comes in a stream of small pieces."""
    _clock: RealClock = msgspec.field(default_factory=RealClock)

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
        """Let the kernel drop data that it cannot deliver within a time."""
        self.tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(within_s * 1000))

    async def send(self, head: h11.Request, body: bytes) -> None:
        """Send a request; the connection must have none under way."""
        if self.http.our_state is h11.DONE:
            self.http.start_next_cycle()
        self.is_answered = self._streams = False
        encoded = (self.http.send(head) or b"") + (self.http.send(h11.Data(data=body)) or b"" if body else b"")
        self.writer.write(encoded + (self.http.send(h11.EndOfMessage()) or b""))
        await self.writer.drain()

    async def answer(self) -> h11.Response:
        """Return the head of the answer."""
        while (event := self._arrived()) is None:
            await self._read(0.0)
        if not isinstance(event, h11.Response):
            raise h11.RemoteProtocolError(f"expected an answer, got {type(event).__name__}")
        return event

    async def part(self, gather_s: float) -> bytes:
        """Return what has arrived of the body since the last part, once that is something; empty at the end.

        With `gather_s`, a part of a stream has what has arrived in that time. What comes after a longer silence does
        not wait.
        """
        pieces: list[bytes] = []
        while self.http.their_state is h11.SEND_BODY:
            event = self._arrived()
            if isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif event is None and any(pieces):
                break
            elif event is None:
                await self._read(gather_s)
        return b"".join(pieces)

    def _arrived(self) -> h11.Event | None:
        """Return the next event of the answer; None if it has not arrived."""
        while True:
            event = self.http.next_event()
            if isinstance(event, h11.Event) and not isinstance(event, h11.InformationalResponse):
                return event
            if event is h11.PAUSED:
                raise h11.RemoteProtocolError("the server sent data after the end of its answer")
            if event is h11.NEED_DATA:
                return None

    async def _read(self, gather_s: float) -> None:
        if self._streams and gather_s:
            self.below.pause_reading()
            try:
                await self._clock.sleep(gather_s)
            finally:
                self.below.resume_reading()
        began_s = monotonic()
        data = await self.reader.read(MOST_READ_BYTES)
        self._streams = is_of_stream(len(data), monotonic() - began_s, gather_s)
        self.is_answered = self.is_answered or bool(data)
        if not data and self.http.their_state is h11.SEND_RESPONSE:
            raise h11.RemoteProtocolError("the server closed the connection before it answered")
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


def is_of_stream(length: int, waited_s: float, gather_s: float) -> bool:
    """Return whether the next read shall wait until more has gathered, after one of `length` bytes.

    More than the kernel would keep must not gather, since a server ends the watch of a client that reads too slowly.
    """
    return length < MUCH_BYTES and waited_s < gather_s


async def opened(credentials: Credentials, identity: TlsIdentity, context: ssl.SSLContext) -> Connection:
    """Return a new connection to the API server. Raises OSError and ValueError."""
    reader, writer = await _unencrypted(credentials)
    below = cast("asyncio.Transport", writer.transport)
    try:
        await writer.start_tls(context, server_hostname=credentials.server_name or credentials.host)
    except BaseException:
        writer.transport.abort()
        raise
    tcp: TransportSocket = writer.get_extra_info("socket")
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        tcp.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(reader, writer, below, tcp, identity)


async def _unencrypted(credentials: Credentials) -> Streams:
    host, port = credentials.host, credentials.port
    if credentials.tunnel is not None:
        return await credentials.tunnel.open(host, port)
    return await asyncio.open_connection(host, port, limit=READ_BYTES)
