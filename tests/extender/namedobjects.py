"""Objects of one kind that are read and written by their name, as the API server keeps them."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable

import msgspec

from tests.kube.scriptedapi import CONFLICT, NOT_FOUND, Call, Reply

Object = dict[str, object]


class NamedObjects:
    """The objects of one kind in one namespace.

    A write needs the version that was read. A write that changes nothing keeps the version.
    """

    def __init__(self, stamp: Callable[[Object], None]) -> None:
        """`stamp` gives an object the next version."""
        self.objects: dict[str, Object] = {}
        self.reply: Reply | None = None
        """The answer to all requests, where they fail."""
        self.silent = False
        """Whether writes are made and never answered."""
        self.writes: list[Object] = []
        """The bodies of all requests to write, whether they were refused or not."""
        self._stamp = stamp

    def answer(self, call: Call) -> Reply:
        """Answer a request to get, create or update an object."""
        if self.reply is not None:
            return self.reply
        body = msgspec.json.decode(call.body, type=Object) if call.body else {}
        name = str(_metadata(body)["name"]) if call.method == "POST" else call.path.rpartition("/")[2]
        stored = self.objects.get(name)
        if call.method == "GET":
            return (200, stored) if stored is not None else NOT_FOUND
        self.writes.append(body)
        if (call.method == "POST") != (stored is None):
            return CONFLICT
        if stored is not None:
            if _metadata(body).get("resourceVersion") != _metadata(stored)["resourceVersion"]:
                return CONFLICT
            if body == stored:
                return 200, stored
        self.put(name, body)
        return 200, never() if self.silent else self.objects[name]

    def put(self, name: str, content: Object) -> None:
        """Create or replace an object, as an administrator."""
        self.objects[name] = copy.deepcopy(content)
        self._stamp(self.objects[name])


async def never() -> AsyncIterator[object]:
    """Never yield."""
    await asyncio.get_running_loop().create_future()
    yield {}


def _metadata(content: Object) -> Object:
    found = content["metadata"]
    assert isinstance(found, dict)
    return found
