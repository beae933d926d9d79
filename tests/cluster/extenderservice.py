"""The extender's Service for programs on the host: it leads where the EndpointSlice of the lab's API server says."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
from lab.cluster.controlplane import ControlPlane

from tests.cluster.serverthreads import ServerThread

EXTENDER = "gpuvirt-extender"
QUESTION = b"{}"
"""A request for /filter that lacks its pod: a replica that leads says so at once, and another that it does not lead."""


def is_of_leader(answer: bytes) -> bool:
    """Return whether an answer to that request is one of a replica that leads."""
    return b"filter: " in answer and b"does not lead" not in answer


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []


class _Port(msgspec.Struct):
    port: int = 0


class _Slice(msgspec.Struct):
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None

    @property
    def address(self) -> tuple[str, int] | None:
        if not self.endpoints or not self.ports:
            return None
        return self.endpoints[0].addresses[0], self.ports[0].port


class Service:
    """A Service as a node's proxy serves it: each new connection goes to the address in its EndpointSlice."""

    def __init__(self, cluster: ControlPlane) -> None:
        self._cluster = cluster
        self._server = ServerThread(self._pass_on)

    @property
    def port(self) -> int:
        """Where the service listens."""
        return self._server.port

    @property
    def address(self) -> tuple[str, int] | None:
        """The address in the EndpointSlice; None while there is none."""
        found = self._cluster.api.get(f"/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/{EXTENDER}")
        return msgspec.json.decode(found, type=_Slice).address if found is not None else None

    @contextmanager
    def running(self) -> Iterator["Service"]:
        """Serve for the duration of the context."""
        with self._server.running():
            yield self

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out: asyncio.StreamWriter | None = None
        try:
            if (address := await self._server.loop.run_in_executor(None, lambda: self.address)) is not None:
                upstream, out = await asyncio.open_connection(*address)
                async with asyncio.TaskGroup() as group:
                    group.create_task(_copy(reader, out))
                    group.create_task(_copy(upstream, writer))
        except OSError:
            pass
        finally:
            for stream in filter(None, (writer, out)):
                stream.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    writer.transport.abort()
