"""A request that its process gives up: the kernel delivers nothing of it afterwards."""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES, pods
from tests.web.certificates import Authority

WITHIN_S = 1.5


class Server:
    """An API server that receives requests and never answers."""

    def __init__(self) -> None:
        self.received = asyncio.Event()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How the client's first connection ended."""
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1 << 16):
                self.received.set()
            self.ended.set_result("closed")
        except ConnectionResetError:
            self.ended.set_result("reset")
        writer.transport.abort()


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Server, Client]]:
    authority, server = Authority(folder), Server()
    pair = authority.server("api", alternatives="IP:127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    path, port = folder / "kubeconfig", listening.sockets[0].getsockname()[1]
    server.port = port
    path.write_text(f"""
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:{port}', certificate-authority: authority.crt}}}}]
users: [{{name: u, user: {{token: abc}}}}]
""")
    client = Client(from_kubeconfig(path))
    try:
        yield server, client
    finally:
        client.close()
        listening.close()


async def test_a_request_without_an_answer_ends_by_a_reset(tmp_path: Path) -> None:
    """A connection that is closed otherwise sends what the kernel still has, whenever the network lets it."""
    async with serving(tmp_path) as (server, client):
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(client.get(NODES, "n", Node))
            await server.received.wait()
            asking.cancel()
        assert await server.ended == "reset"


async def test_the_kernel_gives_a_binding_up_with_its_process(tmp_path: Path) -> None:
    """A process that is stopped cannot reset its connections."""
    async with serving(tmp_path) as (server, client), asyncio.TaskGroup() as group:
        sending = group.create_task(
            client.create_part(pods("default"), "p", "binding", {}, within_s=WITHIN_S, may_send=lambda: True)
        )
        await server.received.wait()
        assert user_timeouts_s(server.port) == [WITHIN_S]
        sending.cancel()


def user_timeouts_s(port: int) -> list[float]:
    """Return after which times the kernel gives up this process's connections to a port."""
    found: list[float] = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as one:
                if one.family != socket.AF_INET or one.getpeername()[1] != port:
                    continue
                found.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000)
    return found
