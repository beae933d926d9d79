"""The connections of an HTTP server that are closed for others, and those that never are."""

import asyncio
import ssl
from pathlib import Path

import pytest

from gpuvirt.web import httpserver
from gpuvirt.web.certificates import CertificateFiles, ClientRules, ServerCertificate
from gpuvirt.web.httpserver import Connections, HttpAnswer, HttpRequest, HttpServer, ServedConnection
from tests.web.certificates import Authority, Pair
from tests.web.webservers import serving

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def answer(_: HttpRequest) -> HttpAnswer:
    return HttpAnswer(200, b"ok\n", "text/plain")


class Clients:
    """Clients of an HTTPS server that verifies the certificates of those that have one."""

    def __init__(self, port: int, authority: Authority) -> None:
        self._port = port
        self._authority = authority

    async def connect(self, own: Pair | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context(cafile=str(self._authority.certificate))
        if own is not None:
            context.load_cert_chain(own.certificate, own.key)
        async with asyncio.timeout(20):
            return await asyncio.open_connection("127.0.0.1", self._port, ssl=context)

    async def ask(self, client: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
        """Return whether the client is answered."""
        reader, writer = client
        async with asyncio.timeout(20):
            try:
                writer.write(GET)
                return (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
            except (OSError, asyncio.IncompleteReadError):
                return False


class Closing:
    """Connections of which it is known which were closed."""

    def __init__(self) -> None:
        self.connections = Connections()
        self.closed: list[int] = []

    def add(self, number: int, now_s: float) -> ServedConnection:
        connection = ServedConnection(lambda: self.closed.append(number), now_s)
        self.connections.add(connection, now_s)
        return connection


def test_newcomers_that_did_not_send_their_request_in_time_make_room() -> None:
    found = Closing()
    late, many = 4, httpserver.MANY_NEWCOMERS
    opened = [found.add(number, now_s=0.0 if number < late else 1.9) for number in range(many)]
    assert found.closed == []
    found.add(many, now_s=2.1)
    assert found.closed == [0]
    found.connections.begin(opened[1])
    found.connections.answered(opened[1])
    for number in range(1, 8):
        found.add(many + number, now_s=2.1)
    assert found.closed == [0, 2, 3], "others have some time left, and one was answered"


def test_the_oldest_newcomers_make_room_where_most_are_in_time() -> None:
    found = Closing()
    for number in range(httpserver.MOST_NEWCOMERS + 3):
        found.add(number, now_s=1.0)
    assert found.closed == [0, 1, 2]


def test_a_newcomer_is_closed_where_all_others_are_being_answered() -> None:
    found = Closing()
    for number in range(httpserver.MOST_NEWCOMERS):
        found.connections.begin(found.add(number, now_s=1.0))
    found.add(-1, now_s=1.0)
    assert found.closed == [-1]


@pytest.mark.parametrize("has_answer", [False, True], ids=["silent", "answered"])
async def test_a_verified_client_stays_while_others_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_answer: bool
) -> None:
    for limit in ("MANY_NEWCOMERS", "MOST_NEWCOMERS", "MOST_ANSWERED"):
        monkeypatch.setattr(httpserver, limit, 5)
    authority = Authority(tmp_path)
    pair, own = authority.server("server", alternatives="IP:127.0.0.1"), authority.client("scheduler")
    rules = ClientRules(authority.certificate, required=False)
    context = ServerCertificate(CertificateFiles(pair.certificate, pair.key, rules)).context
    server = HttpServer(answer, clients=rules)
    async with serving(server, context) as port:
        clients = Clients(port, authority)
        verified, first = await clients.connect(own), await clients.connect()
        if has_answer:
            assert await clients.ask(verified)
            assert await clients.ask(first)
        others = [await clients.connect() for _ in range(6)]
        assert [await clients.ask(other) for other in others] == [False, *[True] * 5]
        assert not await clients.ask(first), "it made room"
        assert await clients.ask(verified)
