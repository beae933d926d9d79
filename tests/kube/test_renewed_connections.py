"""One connection has all requests of a client, until its credentials, the server or the lost lease end it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from gpuvirt.clock import RealClock
from gpuvirt.kube import transport
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.election import Candidacy, Election, Terms
from gpuvirt.kube.failures import NotSentError, UnreachableError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES
from gpuvirt.loops.serialworker import ThreadWorker
from tests.kube.scriptedapi import Call, Reply, ScriptedApi, scripted
from tests.web.certificates import Authority, Pair

NODE: Reply = 200, {"metadata": {"name": "node01"}}
USER = "client-certificate: user.crt, client-key: user.key, tokenFile: token"


class Server:
    """An API server that answers as the test lets it."""

    def __init__(self, folder: Path, api: ScriptedApi) -> None:
        self.folder = folder
        self.api = api

    def write(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)

    def show(self, pair: Pair) -> None:
        self.write("user.crt", pair.certificate.read_bytes())
        self.write("user.key", pair.key.read_bytes())

    def client(self) -> Client:
        (self.folder / "config").write_text(f"""
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:{self.api.port}', certificate-authority: ca.crt}}}}]
users: [{{name: u, user: {{{USER}}}}}]
""")
        return Client(from_kubeconfig(self.folder / "config"))


@asynccontextmanager
async def serving(folder: Path, authority: Authority, server: Pair) -> AsyncIterator[tuple[Server, Client]]:
    async with scripted(lambda _: NODE, server, authority.certificate) as api:
        found = Server(folder, api)
        found.write("ca.crt", authority.certificate.read_bytes())
        found.write("token", b"first")
        found.show(authority.client("jane"))
        yield found, found.client()


async def get(client: Client) -> None:
    assert (await client.get(NODES, "node01", Node)).metadata.name == "node01"


async def patch(client: Client) -> None:
    await client.patch(NODES, "node01", {"metadata": {"labels": {"a": "b"}}}, PatchType.MERGE, Node)


async def until_closed(api: ScriptedApi) -> None:
    while api.connections:
        await RealClock().sleep(0.01)


async def test_all_requests_in_turn_have_one_connection(tmp_path: Path, authority: Authority, server: Pair) -> None:
    async with serving(tmp_path, authority, server) as (found, client):
        for _ in range(5):
            await get(client)
            await patch(client)
    assert (len(found.api.calls), found.api.opened) == (10, 1)


async def test_a_renewed_token_is_sent_on_the_same_connection(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    async with serving(tmp_path, authority, server) as (found, client):
        await get(client)
        found.write("token", b"second")
        await get(client)
    assert [call.headers["authorization"] for call in found.api.calls] == ["Bearer first", "Bearer second"]
    assert found.api.opened == 1


async def test_a_renewed_certificate_has_a_new_connection(tmp_path: Path, authority: Authority, server: Pair) -> None:
    async with serving(tmp_path, authority, server) as (found, client):
        await get(client)
        found.show(authority.client("joe"))
        await get(client)
        assert len(found.api.connections) == 1, "the connection with the former certificate is closed"
    assert [call.client for call in found.api.calls] == ["jane", "joe"]
    assert found.api.opened == 2


async def test_a_ca_that_no_longer_signs_the_server_ends_its_connections(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    (tmp_path / "other").mkdir()
    async with serving(tmp_path, authority, server) as (found, client):
        await get(client)
        found.write("ca.crt", Authority(tmp_path / "other").certificate.read_bytes())
        with pytest.raises(NotSentError, match="CERTIFICATE_VERIFY_FAILED"):
            await get(client)
        found.write("ca.crt", authority.certificate.read_bytes())
        await get(client)
    assert len(found.api.calls) == 2


@pytest.mark.parametrize("ask", [get, patch])
async def test_a_connection_that_the_server_closes_at_this_moment_is_not_used(
    tmp_path: Path, authority: Authority, server: Pair, ask: Callable[[Client], Awaitable[None]]
) -> None:
    """The event loop has not seen the end yet, only the kernel has."""
    async with serving(tmp_path, authority, server) as (found, client):
        await get(client)
        (writer,) = found.api.connections
        with socket.socket(fileno=writer.get_extra_info("socket").fileno()) as raw:
            raw.shutdown(socket.SHUT_RDWR)
            raw.detach()
        await ask(client)
    assert (len(found.api.calls), found.api.opened) == (2, 2)


async def test_a_read_is_repeated_once_when_its_connection_breaks_and_a_write_is_not(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    async with serving(tmp_path, authority, server) as (found, client):
        for ask, is_answered in ((get, True), (patch, False)):
            await get(client)
            found.api.breaks = 1
            if is_answered:
                await ask(client)
                continue
            with pytest.raises(UnreachableError):
                await ask(client)
        found.api.breaks = 2
        with pytest.raises(UnreachableError):
            await get(client)
    methods = [call.method for call in found.api.calls]
    assert methods == ["GET", "GET", "GET", "GET", "PATCH", "GET"]
    assert found.api.breaks == 1, "a request on a new connection is not repeated"


async def test_a_connection_without_requests_is_closed(
    tmp_path: Path, authority: Authority, server: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "WAIT_S", 0.05)
    async with serving(tmp_path, authority, server) as (found, client):
        await asyncio.gather(*(get(client) for _ in range(4)))
        await until_closed(found.api)
        await get(client)
    assert found.api.opened == 5


async def test_after_a_request_without_answer_no_other_connection_is_trusted(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    async with serving(tmp_path, authority, server) as (found, client):
        await asyncio.gather(*(get(client) for _ in range(4)))
        found.api.is_silent = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await get(client)
        await until_closed(found.api)
        found.api.is_silent = False
        await get(client)
    assert found.api.opened == 5


async def test_only_one_connection_is_used_by_each_of_several_loops(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    """A command may run several event loops with one client."""
    async with serving(tmp_path, authority, server) as (found, client):

        def run() -> None:
            for _ in range(2):
                asyncio.run(get(client))

        await ThreadWorker("commands").run(run, name="two commands", timeout_s=60.0)
        await until_closed(found.api)
    assert (len(found.api.calls), found.api.opened) == (2, 2)


async def test_writes_under_way_are_reset_and_reads_go_on(tmp_path: Path, authority: Authority, server: Pair) -> None:
    async with serving(tmp_path, authority, server) as (found, client), asyncio.TaskGroup() as group:
        found.api.is_silent = True
        writing, reading = group.create_task(unanswered(patch(client))), group.create_task(get(client))
        while len(found.api.calls) < 2:
            await RealClock().sleep(0.01)
        client.reset_writes()
        await writing
        while not found.api.resets:
            await RealClock().sleep(0.01)
        assert len(found.api.connections) == 1
        assert not reading.done()
        reading.cancel()


async def unanswered(asking: Awaitable[None]) -> None:
    with pytest.raises(UnreachableError):
        await asking


async def test_a_client_of_a_leader_writes_nothing_without_the_lease(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    async with serving(tmp_path, authority, server) as (found, client):
        leads = True
        leader = client.leading(lambda: leads, within_s=30.0)
        await patch(leader)
        leads = False
        with pytest.raises(NotSentError, match="may no longer write"):
            await patch(leader)
        await get(leader)
        await patch(client)
    assert [call.method for call in found.api.calls] == ["PATCH", "GET", "PATCH"]
    assert found.api.opened == 1


async def test_a_lost_lease_resets_a_write_that_nobody_cancels(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    async with serving(tmp_path, authority, server) as (found, client), asyncio.TaskGroup() as group:
        found.api.answer_by(LeaseThenLost().answer)
        writes: list[asyncio.Task[None]] = []
        terms = Terms(duration_s=2, give_up_s=1.0, renew_s=0.05)
        candidacy = Candidacy("default", "lease", "me", terms)
        election = Election(client, candidacy, RealClock(), Random(1))  # noqa: S311  a jitter

        async def lead() -> None:
            leader = client.leading(lambda: election.may_write, terms.within_s)
            writes.append(group.create_task(unanswered(patch(leader))))
            await asyncio.Event().wait()

        running = group.create_task(election.run(lead))
        while not found.api.resets:
            await RealClock().sleep(0.01)
        await writes[0]
        running.cancel()


class LeaseThenLost:
    """A lease that another process takes once the leader has begun a write, which is never answered."""

    def __init__(self) -> None:
        self._holder = ""
        self._is_writing = False

    def answer(self, call: Call) -> Reply | None:
        if call.path.startswith("/api/v1/nodes"):
            self._is_writing = True
            return None
        if call.method == "PUT":
            self._holder = "me"
        holder = "other" if self._is_writing else self._holder
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 600}
        return 200, {"metadata": {"name": "lease", "resourceVersion": "1"}, "spec": spec}
