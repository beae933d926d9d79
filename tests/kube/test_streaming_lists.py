"""A collection is listed and watched by one request where the server has streaming lists, and by pages elsewhere."""

import asyncio
from collections.abc import AsyncIterator, Callable
from urllib.parse import parse_qs

import pytest

from tests.agent.kubelet.kubeletnode import until
from tests.kube.followednodes import COMPLETE, bookmark, event, following, node
from tests.kube.scriptedapi import Call, Reply, scripted
from tests.web.certificates import Authority, Pair


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
