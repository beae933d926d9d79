"""A collection is listed and watched by one request where the server has streaming lists, and by pages elsewhere."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from urllib.parse import parse_qs

import pytest

from gpuvirt.clock import RealClock
from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.cache import Delta
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.collection import Collection
from gpuvirt.cluster.failures import ApiError
from gpuvirt.cluster.kinds.core import Node
from gpuvirt.cluster.reflector import Reflector, Waits
from gpuvirt.cluster.resources import NODES
from tests.apiserver.scriptedapi import Call, Reply, ScriptedApi, scripted
from tests.kubelet.kubeletnode import until
from tests.web.certificates import Authority, Pair

COMPLETE = {"k8s.io/initial-events-end": "true"}


def node(name: str, version: int) -> object:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def event(kind: str, content: object) -> object:
    return {"type": kind, "object": content}


def bookmark(version: int, annotations: dict[str, str] | None = None) -> object:
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(version), "annotations": annotations or {}}})


class Script:
    """Nodes a and b, and c once the watch is open."""

    def __init__(self, streamed: Callable[[], Reply]) -> None:
        self._streamed = streamed
        self.asked: list[str] = []
        self.ends = asyncio.Event()

    def answer(self, call: Call) -> Reply:
        query = {name: values[0] for name, values in parse_qs(call.target.partition("?")[2]).items()}
        if "sendInitialEvents" in query:
            assert (query["resourceVersionMatch"], query["allowWatchBookmarks"]) == ("NotOlderThan", "true")
            assert "resourceVersion" not in query, "the server answers with what it has now"
            self.asked.append("stream")
            return self._streamed()
        if "watch" in query:
            self.asked.append(f"watch from {query['resourceVersion']}")
            return 200, self.later()
        self.asked.append("list")
        return 200, {"metadata": {"resourceVersion": "7"}, "items": [node("a", 1), node("b", 2)]}

    async def later(self, *first: object) -> AsyncIterator[object]:
        for sent in first:
            yield sent
        yield event("ADDED", node("c", 8))
        yield bookmark(9)
        await self.ends.wait()


class Followed:
    """The reports of a reflector."""

    def __init__(self) -> None:
        self.deltas: list[Sequence[str]] = []
        self.errors: list[ApiError] = []

    def observe(self, delta: Delta[Node]) -> None:
        self.deltas.append(sorted(key.name for key in delta.objects))

    def report(self, error: ApiError | None) -> None:
        if error is not None:
            self.errors.append(error)


@asynccontextmanager
async def following(api: ScriptedApi, authority: Authority, gather_s: float = 0.0) -> AsyncIterator[Followed]:
    credentials = Credentials("127.0.0.1", api.port, "gpuvirt", ca=authority.certificate, token=b"x")
    clock, random = RealClock(), Random(1)  # noqa: S311  a jitter
    followed = Followed()
    reflector = Reflector(Client(credentials), Collection(NODES, Node), clock, random, waits=Waits(gather_s=gather_s))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(reflector.run(followed.observe, followed.report))
        yield followed
        running.cancel()


async def test_one_request_lists_and_watches(authority: Authority, server: Pair) -> None:
    first = event("ADDED", node("a", 1)), event("ADDED", node("b", 2)), bookmark(7, COMPLETE)
    script = Script(lambda: (200, script.later(*first)))
    async with scripted(script.answer, server, authority.certificate) as api:
        api.streams = True
        async with following(api, authority) as followed:
            await until(lambda: len(followed.deltas) == 2)
            assert followed.deltas == [["a", "b"], ["a", "b", "c"]]
            assert script.asked == ["stream"]
            script.ends.set()
            await until(lambda: len(script.asked) > 1)
    assert script.asked[1] == "watch from 9", "the next watch continues at the last bookmark"


async def test_an_incomplete_stream_is_never_taken_for_the_collection(authority: Authority, server: Pair) -> None:
    """The connection breaks before all objects have come."""

    async def cut() -> AsyncIterator[object]:
        yield event("ADDED", node("a", 1))

    first = event("ADDED", node("a", 1)), event("ADDED", node("b", 2)), bookmark(7, COMPLETE)
    script = Script(lambda: (200, cut() if len(script.asked) == 1 else script.later(*first)))
    async with scripted(script.answer, server, authority.certificate) as api:
        api.streams = True
        async with following(api, authority) as followed:
            await until(lambda: len(followed.deltas) == 2)
    assert followed.deltas == [["a", "b"], ["a", "b", "c"]]
    assert script.asked == ["stream", "stream"]
    assert len(followed.errors) == 1


async def lacking() -> AsyncIterator[object]:
    """Answer as Kubernetes 1.36 on etcd 3.4.23."""
    message = "the required storage feature RequestWatchProgress is disabled"
    yield event("ERROR", {"kind": "Status", "message": message, "reason": "InternalError", "code": 500})


@pytest.mark.parametrize("refusal", [400, 422, 200])
async def test_a_server_without_streaming_lists_is_listed_by_pages(
    authority: Authority, server: Pair, refusal: int
) -> None:
    refused = {"message": "sendInitialEvents is forbidden for watch", "code": refusal}
    script = Script(lambda: (refusal, lacking() if refusal == 200 else refused))
    async with scripted(script.answer, server, authority.certificate) as api:
        api.streams = True
        async with following(api, authority) as followed:
            await until(lambda: len(followed.deltas) == 2)
    assert script.asked == ["stream", "list", "watch from 7"]
    assert followed.errors == []
