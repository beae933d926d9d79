"""An HTTPS server in the place of an API server; the test scripts its answers, and it records requests."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import h11

from tests.web.certificates import Pair


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    method: str
    target: str
    headers: Mapping[str, str]
    """By lower-case names; the values of a repeated header are joined by commas."""
    body: bytes
    client: str | None
    """The common name in the client's certificate."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


Reply = tuple[int, object]
"""A status, and its body as JSON; the items of an iterator are sent as one line each."""
FORBIDDEN: Reply = 403, {"kind": "Status", "message": "the role lacks a rule", "code": 403}
NOT_FOUND: Reply = 404, {"kind": "Status", "message": "not found", "code": 404}
NOT_STREAMED: Reply = 422, {"kind": "Status", "message": "sendInitialEvents is forbidden for watch", "code": 422}
CONFLICT: Reply = 409, {"kind": "Status", "message": "the object has been modified", "code": 409}


class ScriptedApi:
    """The server, with the requests that it has received. Like an API server it keeps connections."""

    def __init__(self, answer: Callable[[Call], Reply | None]) -> None:
        self._answer = answer
        self.calls: list[Call] = []
        self.names: list[str | None] = []
        """The server names that clients have requested (SNI)."""
        self.port = 0
        self.headers: dict[str, str] = {}
        """Headers of all answers."""
        self.opened = 0
        """The number of connections so far."""
        self.connections: set[asyncio.StreamWriter] = set()
        """The connections that are open."""
        self.resets = 0
        """How many connections clients have reset."""
        self.breaks = 0
        """How many of the next requests end their connection instead of an answer."""
        self.ends_watches = False
        """Whether a watch whose script ends is ended as by an API server; otherwise its connection breaks."""
        self.streams = False
        """Whether the script answers streaming lists; otherwise they are refused, and not recorded."""
        self.is_silent = False
        """Whether requests get no answer."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's requests."""
        self.opened += 1
        self.connections.add(writer)
        try:
            http = h11.Connection(h11.SERVER)
            with suppress(OSError, h11.RemoteProtocolError, asyncio.CancelledError), self._count_resets():
                while await self._serve_one(http, reader, writer):
                    http.start_next_cycle()
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _serve_one(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request, and return whether the connection may have another."""
        call = await self._call(http, reader, writer)
        if "sendInitialEvents" in call.target and not self.streams:
            return await self._reply(http, writer, NOT_STREAMED)
        self.calls.append(call)
        if self.breaks:
            self.breaks -= 1
            return False
        reply = None if self.is_silent else self._answer(call)
        if reply is None:
            await reader.read(1)  # until the client gives up
            return False
        content = reply[1]
        if isinstance(content, AsyncIterator):
            await self._stream(http, writer, content)
            return self.ends_watches
        return await self._reply(http, writer, reply)

    async def _reply(self, http: h11.Connection, writer: asyncio.StreamWriter, reply: Reply) -> bool:
        status, content = reply
        body = json.dumps(content).encode()
        headers = [("Content-Length", str(len(body))), *self.headers.items()]
        writer.write(http.send(h11.Response(status_code=status, headers=headers)) or b"")
        writer.write((http.send(h11.Data(data=body)) or b"") + (http.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        return http.our_state is h11.DONE and http.their_state is h11.DONE

    @contextmanager
    def _count_resets(self) -> Iterator[None]:
        try:
            yield
        except ConnectionResetError:
            self.resets += 1
            raise

    def answer_by(self, answer: Callable[[Call], Reply | None]) -> None:
        """Answer by another script from now on; None is no answer at all."""
        self._answer = answer

    def close_connections(self) -> None:
        """Close all connections, as a server that ends."""
        for writer in self.connections:
            writer.close()

    async def _stream(self, http: h11.Connection, writer: asyncio.StreamWriter, events: AsyncIterator[object]) -> None:
        headers = [("Transfer-Encoding", "chunked"), *([] if self.ends_watches else [("Connection", "close")])]
        writer.write(http.send(h11.Response(status_code=200, headers=headers)) or b"")
        async for event in events:
            writer.write(http.send(h11.Data(data=json.dumps(event).encode() + b"\n")) or b"")
            await writer.drain()
        if self.ends_watches:
            writer.write(http.send(h11.EndOfMessage()) or b"")

    async def _call(self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
        head, body = None, b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif head is not None and isinstance(event, h11.EndOfMessage):
                return Call(head.method.decode(), head.target.decode(), _joined(head), body, _client(writer))
            else:
                raise OSError("no request")


def _joined(head: h11.Request) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name, value in head.headers:
        key = name.decode()
        found[key] = f"{found[key]},{value.decode()}" if key in found else value.decode()
    return found


def _client(writer: asyncio.StreamWriter) -> str | None:
    certificate = writer.get_extra_info("ssl_object").getpeercert() or {}
    names = (value for parts in certificate.get("subject", ()) for key, value in parts if key == "commonName")
    return next(names, None)


@asynccontextmanager
async def scripted(answer: Callable[[Call], Reply | None], server: Pair, clients: Path) -> AsyncIterator[ScriptedApi]:
    """Serve as `server` on a free port of 127.0.0.1; `clients` is the authority of clients' certificates."""
    api = ScriptedApi(answer)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(clients))
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_cert_chain(server.certificate, server.key)

    def keep_name(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        api.names.append(name)

    context.sni_callback = keep_name
    listening = await asyncio.start_server(api.serve, "127.0.0.1", 0, ssl=context)
    api.port = listening.sockets[0].getsockname()[1]
    try:
        yield api
    finally:
        listening.close()
        api.close_connections()
