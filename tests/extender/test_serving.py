"""The extender's HTTP server: any bytes get a clear answer, and none ends it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from gpuvirt.clock import RealClock
from gpuvirt.extender.process import ExtenderPages
from gpuvirt.web import httpserver
from gpuvirt.web.certificates import Handshakes
from gpuvirt.web.httpserver import REQUEST_S, HttpServer
from tests.extender.httpclient import FILTER, Connection, ask, request
from tests.extender.standby import Standby
from tests.web.webservers import serving

GET = b"GET /filter HTTP/1.1\r\nHost: x\r\n\r\n"
"""A request whose connection is kept after the answer, 405."""


Connect = Callable[[], Awaitable[Connection]]


def standby(*, request_s: float = REQUEST_S) -> HttpServer:
    return HttpServer(ExtenderPages(Standby(), RealClock(), None, Handshakes()).answer, request_s=request_s)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(standby()) as port:
        yield port


@pytest.fixture
async def connect(port: int) -> AsyncIterator[Callable[[], Awaitable[Connection]]]:
    """Return a function that opens connections, which end with the test."""
    opened: list[Connection] = []

    async def open_one() -> Connection:
        opened.append(Connection(*await asyncio.open_connection("127.0.0.1", port)))
        return opened[-1]

    yield open_one
    for connection in opened:
        connection.writer.transport.abort()


async def test_a_replica_that_does_not_lead_answers_an_error_and_closes_the_connection(connect: Connect) -> None:
    client = await connect()
    await client.send(request())
    status, headers, body = await client.answer()
    assert (status, headers["connection"]) == (200, "close")
    assert msgspec.json.decode(body)["Error"].startswith("this replica of the extender does not lead")
    assert await client.is_closed()


async def test_other_connections_are_kept(connect: Connect) -> None:
    client = await connect()
    for _ in range(3):
        await client.send(GET)
        assert (await client.answer())[0] == 405


async def test_requests_that_come_at_once_are_answered_in_turn(connect: Connect) -> None:
    client = await connect()
    await client.send(GET + request("/nothing", b"", method="GET"))
    assert [(await client.answer())[0] for _ in range(2)] == [405, 404]


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (request("/filter", b"", method="GET"), 405, "only POST is supported here"),
        (request("/scores"), 404, "no such page; pages are /filter, /prioritize, /preempt, /bind; metrics and probes"),
        (request("/metrics", b"", method="GET"), 404, "have another port"),
        (request(Content_Type="text/yaml"), 200, "filter: the content type is text/yaml; expected application/json"),
        (request(Content_Type="application/json; charset=utf-8"), 200, "does not lead"),
        (request(Content_Length=str(33 << 20)), 200, "filter: the body is larger than 32 MiB"),
        (b"nonsense\r\n\r\n", 400, "illegal request line"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, ""),
        (request(Content_Length="-1"), 400, ""),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", 400, ""),
    ],
)
async def test_bad_requests_get_a_clear_answer(port: int, content: bytes, status: int, text: str) -> None:
    found, _, body = await ask(port, content)
    assert (found, text in body.decode()) == (status, True), body
    assert (await ask(port, GET))[0] == 405


async def test_a_torn_body_ends_its_connection_alone(port: int, connect: Connect) -> None:
    client = await connect()
    await client.send(request()[:-10])
    client.writer.write_eof()
    assert (await client.answer())[0] == 400
    assert (await ask(port, request()))[0] == 200


async def test_a_body_in_pieces_and_in_chunks_is_read(connect: Connect) -> None:
    client = await connect()
    for start in range(0, len(request()), 50):
        await client.send(request()[start : start + 50])
    assert (await client.answer())[0] == 200
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (FILTER[:7], FILTER[7:])) + b"0\r\n\r\n"
    head = b"POST /filter HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    client = await connect()
    await client.send(head)
    assert (await client.answer())[0] == 100
    await client.send(chunks)
    assert (await client.answer())[0] == 200


async def test_chunks_are_limited_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpserver, "MOST_BODY_BYTES", 1000)
    head = b"POST /filter HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    _, _, body = await ask(port, head + b"%x\r\n%s\r\n" % (2000, b"x" * 2000))
    assert b"filter: the body is larger than" in body


async def test_silent_clients_are_closed_and_keep_nobody_out(
    port: int, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpserver, "MANY_NEWCOMERS", 10)
    monkeypatch.setattr(httpserver, "MOST_NEWCOMERS", 20)
    silent = [await connect() for _ in range(30)]
    assert (await ask(port, GET))[0] == 405
    assert await silent[0].is_closed()


async def test_half_sent_requests_keep_nobody_out(port: int, connect: Connect) -> None:
    kept = await connect()
    await kept.send(GET)
    assert (await kept.answer())[0] == 405
    for _ in range(httpserver.MOST_NEWCOMERS + 44):
        await (await connect()).send(request()[:-10])
    for _ in range(5):
        async with asyncio.timeout(2):
            assert (await ask(port, request()))[0] == 200, "a newcomer is answered at once"
    await kept.send(GET)
    assert (await kept.answer())[0] == 405, "a connection that was answered before is kept"


async def test_a_half_sent_request_is_finished_while_others_come(connect: Connect) -> None:
    client = await connect()
    await client.send(request()[:-10])
    for _ in range(200):
        await connect()
    await client.send(request()[-10:])
    assert (await client.answer())[0] == 200


async def test_connections_that_were_answered_make_room_for_others_that_were_answered(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpserver, "MOST_ANSWERED", 10)
    clients = [await connect() for _ in range(11)]
    for client in clients:
        await client.send(GET)
        assert (await client.answer())[0] == 405
    assert await clients[0].is_closed()
    await clients[1].send(GET)
    assert (await clients[1].answer())[0] == 405


async def test_half_sent_bodies_take_no_more_memory_than_allowed(
    port: int, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpserver, "MOST_PENDING_BYTES", 1000)
    small, large = await connect(), await connect()
    await small.send(request(body=b"x" * 400)[:-1])
    await large.send(request(body=b"x" * 900)[:-1])
    assert await large.is_closed()
    assert (await ask(port, request()))[0] == 200
    await small.send(b"x")
    assert (await small.answer())[0] == 200


async def test_a_slow_request_is_given_up() -> None:
    async with serving(standby(request_s=0.1)) as port:
        client = Connection(*await asyncio.open_connection("127.0.0.1", port))
        try:
            await client.send(request()[:-10])
            assert await client.is_closed()
        finally:
            client.writer.transport.abort()


async def test_requests_are_counted_by_verb_and_result() -> None:
    pages = ExtenderPages(Standby(), RealClock(), None, Handshakes())
    async with serving(HttpServer(pages.answer)) as port:
        await ask(port, request())
        await ask(port, request(Content_Type="text/yaml"))
    page = pages.pages()["/metrics"]()
    assert page.status == 200
    lines = page.body.splitlines()
    assert 'gpuvirt_extender_requests_total{verb="filter",result="not-serving"} 1' in lines
    assert 'gpuvirt_extender_requests_total{verb="filter",result="malformed"} 1' in lines
    assert 'gpuvirt_extender_request_seconds_count{verb="filter"} 2' in lines
    assert "gpuvirt_extender_leads 0" in lines
