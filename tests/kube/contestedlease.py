"""A lease and other objects that rivals write between the requests of a client."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from typing_extensions import override

from gpuvirt.clock import RealClock
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.election import Candidacy, Election
from tests.kube.scriptedapi import CONFLICT, NOT_FOUND, Call, Reply, ScriptedApi, scripted
from tests.web.certificates import Pair

LEASES = "/apis/coordination.k8s.io/v1/namespaces/gpuvirt/leases"
LEASE = f"{LEASES}/gpuvirt-controller"
Object = dict[str, dict[str, object]]


class Hasty(RealClock):
    """Never waits, but yields to other tasks."""

    @override
    async def sleep(self, seconds: float, /) -> None:
        await super().sleep(0)


class Peer:
    """An API server's objects, and a writer that changes an object on each read, `rivals` times."""

    def __init__(self, rivals: int, objects: dict[str, Object] | None = None) -> None:
        self.objects: dict[str, Object] = objects if objects is not None else {}
        """By path."""
        self._rivals = rivals
        self.relabels = 0
        """How often another client writes to the lease, and leaves its holder."""
        self._version = 1

    def answer(self, call: Call) -> Reply:
        found = self.objects.get(call.path)
        if call.method == "GET":
            reply: Reply = (200, json.loads(json.dumps(found))) if found is not None else NOT_FOUND
            self._interfere(call.path)
            return reply
        if call.method == "POST":
            return CONFLICT if LEASE in self.objects else self._put(LEASE, json.loads(call.body))
        if found is None:
            return NOT_FOUND
        if call.method == "PUT":
            sent = json.loads(call.body)
            is_old = sent["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]
            return CONFLICT if is_old else self._put(call.path, sent)
        return self._deleted(call, found)

    def _interfere(self, path: str) -> None:
        if self._rivals and path == LEASE:
            self._rivals -= 1
            self._put(path, {"metadata": {"name": "gpuvirt-controller"}, "spec": {"holderIdentity": "rival"}})
        if self.relabels and path in self.objects:
            self.relabels -= 1
            self._put(path, self.objects[path])

    def write(self, lease: Object) -> None:
        """Write the lease, as another client does."""
        self._put(LEASE, lease)

    def _put(self, path: str, content: Object) -> Reply:
        self._version += 1
        self.objects[path] = {**content, "metadata": {**content["metadata"], "resourceVersion": str(self._version)}}
        return 200, self.objects[path]

    def _deleted(self, call: Call, found: Object) -> Reply:
        if json.loads(call.body)["preconditions"]["uid"] != found["metadata"]["uid"]:
            return CONFLICT
        del self.objects[call.path]
        return 200, {"kind": "Status"}


@asynccontextmanager
async def serving(answer: Callable[[Call], Reply], server: Pair, ca: Path) -> AsyncIterator[tuple[ScriptedApi, Client]]:
    async with scripted(answer, server, ca) as api:
        yield api, Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=ca, token=b"x"))


def election(client: Client, me: str) -> Election:
    return Election(client, Candidacy("gpuvirt", "gpuvirt-controller", me), Hasty(), Random(1))  # noqa: S311  no secrets
