"""A server that is too busy (429) is asked again when it says so, by reads, watches and writes alike."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from time import monotonic  # noqa: TID251  the pause is what is tested

import pytest
from typing_extensions import override

from gpuvirt.clock import RealClock
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import REREAD_AFTER_S, Client, PatchType
from gpuvirt.kube.failures import ApiError, ApiRefusedError, UnreachableError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES, Collection
from gpuvirt.kube.transport import MOST_BUSY
from tests.kube.scriptedapi import Call, Reply, scripted
from tests.web.certificates import Authority, Pair

NODE = {"metadata": {"name": "node01", "resourceVersion": "1"}}


async def get(client: Client) -> None:
    await client.get(NODES, "node01", Node)


async def listing(client: Client) -> None:
    await client.list(Collection(NODES, Node))


async def watch(client: Client) -> None:
    async with client.watch(Collection(NODES, Node), "1", for_s=300) as events:
        assert [event.version for event in await anext(events)] == ["2"]


async def patch(client: Client) -> None:
    await client.patch(NODES, "node01", {}, PatchType.MERGE, Node)


async def one_event() -> AsyncIterator[object]:
    yield {"type": "MODIFIED", "object": {"metadata": {"name": "node01", "resourceVersion": "2"}}}


def answer(call: Call) -> Reply:
    if "watch=1" in call.target:
        return 200, one_event()
    return 200, NODE if "node01" in call.path else {"metadata": {"resourceVersion": "1"}, "items": [NODE]}


class Busy:
    """Answers some requests by an error before all others."""

    def __init__(self, code: int, refusals: int) -> None:
        self._code = code
        self._refusals = refusals

    def answer(self, call: Call) -> Reply:
        if self._refusals:
            self._refusals -= 1
            return self._code, {"message": "busy", "code": self._code}
        return answer(call)


def client_of(port: int, authority: Authority) -> Client:
    return Client(Credentials("127.0.0.1", port, "gpuvirt", ca=authority.certificate, token=b"x"))


@pytest.mark.parametrize("ask", [get, listing, watch, patch])
async def test_a_request_is_sent_again_after_the_pause_that_the_server_asks_for(
    authority: Authority, server: Pair, ask: Callable[[Client], Awaitable[None]]
) -> None:
    async with scripted(Busy(429, 1).answer, server, authority.certificate) as api:
        api.headers = {"Retry-After": "1"}
        began_s = monotonic()
        await ask(client_of(api.port, authority))
        assert monotonic() - began_s >= 1.0
        assert (len(api.calls), api.opened) == (2, 1)


@pytest.mark.parametrize(
    ("ask", "code", "pause_s", "sent"),
    [(get, 500, "", 2), (listing, 504, "", 2), (patch, 500, "", 1), (get, 403, "", 1), (get, 503, "60", 1)],
)
async def test_a_client_that_is_rereading_sends_a_failed_read_once_more(
    authority: Authority, server: Pair, ask: Callable[[Client], Awaitable[None]], code: int, pause_s: str, sent: int
) -> None:
    """Neither a write nor a read that is forbidden, or that the server wants to have later."""
    async with scripted(Busy(code, 1).answer, server, authority.certificate) as api:
        api.headers = {"Retry-After": pause_s} if pause_s else {}
        with nullcontext() if sent == 2 else pytest.raises(ApiError):
            await ask(client_of(api.port, authority).rereading(RealClock()))
        assert len(api.calls) == sent


class Sleeps(RealClock):
    """A clock that notes how long was slept."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    @override
    async def sleep(self, seconds: float, /) -> None:
        self.slept_s.append(seconds)


async def test_a_client_that_is_rereading_reads_twice_from_a_server_that_is_away(authority: Authority) -> None:
    clock = Sleeps()
    with pytest.raises(UnreachableError):
        await get(client_of(1, authority).rereading(clock))
    assert clock.slept_s == [REREAD_AFTER_S]


async def test_a_server_that_stays_busy_is_reported_with_its_pause(authority: Authority, server: Pair) -> None:
    async with scripted(Busy(429, 100).answer, server, authority.certificate) as api:
        api.headers = {"Retry-After": "1"}
        with pytest.raises(ApiRefusedError, match="429: busy") as caught:
            await patch(client_of(api.port, authority))
        assert caught.value.retry_after_s == 1.0
        assert len(api.calls) == MOST_BUSY + 1


@pytest.mark.parametrize(
    ("code", "after", "ask"),
    [(429, "", get), (429, "600", get), (500, "1", get), (503, "1", patch)],
    ids=["no pause", "long pause", "another error", "a write that may have begun"],
)
async def test_other_refusals_are_reported_at_once(
    authority: Authority, server: Pair, code: int, after: str, ask: Callable[[Client], Awaitable[None]]
) -> None:
    async with scripted(Busy(code, 1).answer, server, authority.certificate) as api:
        api.headers = {"Retry-After": after} if after else {}
        with pytest.raises(ApiRefusedError) as caught:
            await ask(client_of(api.port, authority))
        assert caught.value.retry_after_s == float(after or 0)
        assert len(api.calls) == 1
