"""Proxies of tests: HTTP CONNECT, with TLS or without, and SOCKS5; they record the requested targets."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from socket import inet_ntoa

import h11

from tests.web.certificates import Pair


class TestProxy:
    """A proxy that connects to one target, whatever host the client requests."""

    __test__ = False

    def __init__(self, port: int, login: str = "", refusal: int = 0, host: str = "127.0.0.1") -> None:
        """`login` is the required login; `refusal` is a code with which the proxy answers every request."""
        self.asked: list[str] = []
        self.logins: list[str] = []
        self.port = 0
        self._target = host, port
        self._login = login
        self._refusal = refusal

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client by CONNECT."""
        http = h11.Connection(h11.SERVER)
        while (event := http.next_event()) is h11.NEED_DATA:
            http.receive_data(await reader.read(65536))
        assert isinstance(event, h11.Request)
        assert event.method == b"CONNECT"
        self.asked.append(event.target.decode())
        self.logins.append(dict(event.headers).get(b"proxy-authorization", b"").decode())
        status = self._refusal or (200 if self.logins[-1] == self._login else 407)
        writer.write(f"HTTP/1.1 {status} As Said\r\n\r\n".encode())
        await self._lead(reader, writer, leads=status == 200)

    async def socks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client by SOCKS5."""
        _, count = await reader.readexactly(2)
        offered = await reader.readexactly(count)
        writer.write(bytes([5, 2 if self._login else 0]))
        if self._login:
            assert 2 in offered
            assert await reader.readexactly(1) == b"\x01"
            user = await reader.readexactly((await reader.readexactly(1))[0])
            password = await reader.readexactly((await reader.readexactly(1))[0])
            self.logins.append(f"{user.decode()}:{password.decode()}")
            writer.write(bytes([1, self.logins[-1] != self._login]))
            if self.logins[-1] != self._login:
                await writer.drain()
                return
        head = await reader.readexactly(4)
        if head == bytes([5, 1, 0, 1]):
            name = inet_ntoa(await reader.readexactly(4))
        else:
            assert head == bytes([5, 1, 0, 3]), "by name, so that the proxy resolves it"
            name = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
        self.asked.append(f"{name}:{int.from_bytes(await reader.readexactly(2))}")
        writer.write(bytes([5, self._refusal, 0, 1, 127, 0, 0, 1, 0, 1]))
        await self._lead(reader, writer, leads=not self._refusal)

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, leads: bool) -> None:
        await writer.drain()
        if not leads:
            return
        upstream, out = await asyncio.open_connection(*self._target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, out))
                group.create_task(_copy(upstream, writer))
        finally:
            out.transport.abort()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy a stream until it ends, then abort the other side."""
    with suppress(OSError):
        while part := await source.read(65536):
            sink.write(part)
            await sink.drain()
    sink.transport.abort()


@asynccontextmanager
async def proxying(proxy: TestProxy, scheme: str, pair: Pair) -> AsyncIterator[str]:
    """Run a proxy, and provide its URL; `pair` is its certificate for TLS."""
    context = None
    if scheme == "https":
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pair.certificate, pair.key)
    serve, served = proxy.socks if scheme.startswith("socks") else proxy.http, set[asyncio.Task[None]]()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await serve(reader, writer)
        finally:
            writer.transport.abort()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(group.create_task(handle(reader, writer)))

    async with asyncio.TaskGroup() as group:
        listening = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
        proxy.port = listening.sockets[0].getsockname()[1]
        try:
            yield f"{scheme}://127.0.0.1:{proxy.port}"
        finally:
            listening.close()
            for task in served:
                task.cancel()
