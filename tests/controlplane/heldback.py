"""A proxy before the lab's API server that holds requests back and delivers them later, when their client is gone."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lab.cluster import settings
from lab.cluster.controlplane import ControlPlane

from tests.cluster.serverthreads import ServerThread

_LABELS = ('code="409"', 'resource="pods"', 'subresource="binding"')
"""Of the API server's metric for bindings that it has refused by a conflict."""


@dataclass(eq=False)
class _Connection:
    """A connection of the client, and what of it is held back."""

    held: bytearray = field(default_factory=bytearray)
    is_answered: bool = True
    """Whether the API server has answered, or ended the connection, since the delivery."""


class HeldBack:
    """The proxy, on a thread of its own."""

    def __init__(self, cluster: ControlPlane) -> None:
        self._cluster = cluster
        self._server = ServerThread(self._pass_on)
        self._open = asyncio.Event()
        self._connections: set[_Connection] = set()

    @property
    def is_delivered(self) -> bool:
        """Whether the API server has answered all that was held back."""
        return all(connection.is_answered and not connection.held for connection in tuple(self._connections))

    @property
    def refused(self) -> int:
        """How many bindings the API server has refused by a conflict."""
        found = self._cluster.api.get("/metrics")
        assert found is not None
        counts = (line for line in found.decode().splitlines() if line.startswith("apiserver_request_total{"))
        return sum(int(line.rpartition(" ")[2]) for line in counts if all(label in line for label in _LABELS))

    def hold(self) -> None:
        """Hold back all that the client sends from now on."""
        self._server.loop.call_soon_threadsafe(self._open.clear)

    def deliver(self) -> None:
        """Deliver what was held back, also of connections that the client has ended."""
        self._server.loop.call_soon_threadsafe(self._open.set)

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig of the proxy."""
        path, ca = folder / "held-back.kubeconfig", self._cluster.ca
        server = f"{{server: 'https://127.0.0.1:{self._server.port}', tls-server-name: {self._cluster.place.address}"
        path.write_text(f"""
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {server}, certificate-authority: {ca}}}}}]
users: [{{name: u, user: {{token: {settings.ADMIN_TOKEN}}}}}]
""")
        return path

    @contextmanager
    def running(self) -> Iterator["HeldBack"]:
        """Serve for the duration of the context."""
        self._open.set()
        with self._server.running():
            yield self

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = self._cluster.place
        upstream, out = await asyncio.open_connection(place.address, place.port)
        connection = _Connection()
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                answers = group.create_task(self._answers(connection, upstream, writer))
                with suppress(OSError):
                    while part := await reader.read(1 << 16):
                        connection.held += part
                        if self._open.is_set():
                            self._send(connection, out)
                        else:
                            group.create_task(self._send_later(connection, out))
                while connection.held or not connection.is_answered:
                    await asyncio.wait({answers}, timeout=0.05)
                answers.cancel()
        finally:
            self._connections.discard(connection)
            for stream in (writer, out):
                stream.transport.abort()

    async def _send_later(self, connection: _Connection, out: asyncio.StreamWriter) -> None:
        await self._open.wait()
        if connection.held:
            connection.is_answered = False
            self._send(connection, out)

    def _send(self, connection: _Connection, out: asyncio.StreamWriter) -> None:
        out.write(bytes(connection.held))
        connection.held.clear()

    async def _answers(
        self, connection: _Connection, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while part := await upstream.read(1 << 16):
                connection.is_answered = True
                if not writer.is_closing():
                    writer.write(part)
        connection.is_answered = True
        connection.held.clear()


@contextmanager
def held_back(cluster: ControlPlane) -> Iterator[HeldBack]:
    """Run a proxy."""
    with HeldBack(cluster).running() as found:
        yield found
