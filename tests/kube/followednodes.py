"""The nodes of a scripted API server, the events of their watches, and a reflector that follows them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

from gpuvirt.clock import RealClock
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.reflector import Reflector, Waits
from gpuvirt.kube.resources import NODES, Collection
from tests.kube.scriptedapi import ScriptedApi
from tests.web.certificates import Authority

COMPLETE = {"k8s.io/initial-events-end": "true"}


def node(name: str, version: int) -> object:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def event(kind: str, content: object) -> object:
    return {"type": kind, "object": content}


def bookmark(version: int, annotations: dict[str, str] | None = None) -> object:
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(version), "annotations": annotations or {}}})


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
