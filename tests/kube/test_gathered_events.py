"""Events in a stream gather before they are read; an event after a silence does not wait, and no event is lost."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gpuvirt.clock import RealClock
from gpuvirt.kube.connection import MUCH_BYTES, is_of_stream
from tests.agent.kubelet.kubeletnode import until
from tests.kube.followednodes import COMPLETE, bookmark, event, following, node
from tests.kube.scriptedapi import Call, Reply, scripted
from tests.web.certificates import Authority, Pair

EVENTS = 100
NAMES = [f"n{number:03}" for number in range(EVENTS)]
GATHER_S = 0.5


class Stream:
    """A streaming list without objects, and a stream of events; the watch ends as the test says."""

    def __init__(self) -> None:
        self.watches = 0
        self.ends = asyncio.Event()

    def answer(self, _: Call) -> Reply:
        self.watches += 1
        return 200, self.events() if self.watches == 1 else self.silence()

    async def events(self) -> AsyncIterator[object]:
        yield bookmark(1, COMPLETE)
        for version, name in enumerate(NAMES, 2):
            yield event("ADDED", node(name, version))
            await RealClock().sleep(0.002)
        await self.ends.wait()

    async def silence(self) -> AsyncIterator[object]:
        yield bookmark(1000, COMPLETE)
        await asyncio.Event().wait()


@pytest.mark.parametrize("ends_early", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
async def test_events_of_a_stream_are_observed_together(
    authority: Authority, server: Pair, *, ends_early: bool, is_cut: bool
) -> None:
    """The watch ends while events gather, or after; as a server ends it, or by a break of the connection."""
    stream = Stream()
    if ends_early:
        stream.ends.set()
    async with scripted(stream.answer, server, authority.certificate) as api:
        api.streams, api.ends_watches = True, not is_cut
        async with following(api, authority, GATHER_S) as followed:
            await until(lambda: bool(followed.deltas) and followed.deltas[-1] == NAMES)
            stream.ends.set()
            await until(lambda: stream.watches == 2)
    assert len(followed.deltas) < EVENTS / 2, "each delta has many events"
    assert all(len(later) > len(earlier) for earlier, later in zip(followed.deltas, followed.deltas[1:], strict=False))


@pytest.mark.parametrize(
    ("length", "waited_s", "is_stream"),
    [(8_000, 0.0, True), (8_000, 0.09, True), (8_000, 0.1, False), (8_000, 60.0, False), (MUCH_BYTES, 0.0, False)],
)
def test_what_follows_a_silence_or_much_does_not_wait(length: int, waited_s: float, *, is_stream: bool) -> None:
    """A server ends the watch of a client that reads too slowly, so much must not gather."""
    assert is_of_stream(length, waited_s, 0.1) == is_stream
