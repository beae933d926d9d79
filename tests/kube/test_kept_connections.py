"""Connections to the API server that are kept: used again while they are good, and never after."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuvirt.clock import RealClock
from gpuvirt.kube import transport
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import NotSentError, UnreachableError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES, pods
from gpuvirt.web.httpserver import HttpAnswer, HttpRequest, HttpServer
from tests.web.certificates import Authority

NODE = b'{"metadata": {"name": "n"}}'


class Server:
    """An API server that keeps connections, and counts them."""

    def __init__(self) -> None:
        self.requests = 0
        self.closes = False
        self.breaks = False
        self.connections: set[object] = set()
        self.answers_slowly = asyncio.Event()
        self.http = HttpServer(self.answer)

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        self.requests += 1
        self.connections |= self.http.connections.being_answered
        await self.answers_slowly.wait()
        if self.breaks:
            raise ConnectionResetError
        return HttpAnswer(201 if request.method == "POST" else 200, NODE, closes=self.closes)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Server, Client]]:
    authority, server = Authority(folder), Server()
    pair = authority.server("api", alternatives="IP:127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    server.answers_slowly.set()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.http.run("127.0.0.1", 0, context))
        while server.http.port is None:
            await RealClock().sleep(0.01)
        path, url = folder / "kubeconfig", f"https://127.0.0.1:{server.http.port}"
        path.write_text(f"""
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: '{url}', certificate-authority: authority.crt}}}}]
users: [{{name: u, user: {{token: abc}}}}]
""")
        client = Client(from_kubeconfig(path))
        yield server, client
        client.close()
        await RealClock().sleep(0.05)
        running.cancel()


async def get(client: Client) -> str:
    return (await client.get(NODES, "n", Node)).metadata.name


async def test_requests_in_turn_share_a_connection(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, client):
        assert [await get(client) for _ in range(5)] == ["n"] * 5
        assert (server.requests, len(server.connections)) == (5, 1)


async def test_requests_at_once_have_connections_of_their_own_and_keep_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, client):
        for _ in range(2):
            server.answers_slowly.clear()
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(get(client))
                await RealClock().sleep(0.2)
                server.answers_slowly.set()
        assert (server.requests, len(server.connections)) == (8, 4)


async def test_a_connection_that_the_server_closes_is_not_used_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, client):
        server.closes = True
        assert [await get(client) for _ in range(3)] == ["n"] * 3
        assert len(server.connections) == 3


async def test_a_server_that_closes_before_its_answer_is_said_to(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, client):
        server.breaks = True
        with pytest.raises(UnreachableError, match=r":\d+: the server closed the connection before it answered"):
            await client.create_part(pods("default"), "p", "binding", {}, within_s=30.0, may_send=lambda: True)
        assert server.requests == 1, "nobody knows whether it was made"


async def test_a_connection_that_waited_for_long_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (server, client):
        monkeypatch.setattr(transport, "WAIT_S", 0.0)
        assert [await get(client) for _ in range(2)] == ["n"] * 2
        assert len(server.connections) == 2


async def test_a_process_that_may_no_longer_write_sends_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, client):
        await get(client)
        with pytest.raises(NotSentError, match="may no longer write"):
            await client.create_part(pods("default"), "p", "binding", {}, within_s=30.0, may_send=lambda: False)
        await client.create_part(pods("default"), "p", "binding", {}, within_s=30.0, may_send=lambda: True)
        assert server.requests == 2


async def test_a_server_that_is_away_was_sent_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        pass
    with pytest.raises(UnreachableError) as caught:
        await get(client)
    assert isinstance(caught.value, NotSentError)
