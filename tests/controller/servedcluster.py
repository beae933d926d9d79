"""An API server with the objects of a cluster, for a controller that runs against it over HTTPS.

It has the verbs that the controller uses, streaming lists, and the list of API groups. Applied objects are merged.
"""

import asyncio
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from operator import itemgetter
from random import Random
from urllib.parse import parse_qs

from gpuvirt.clock import Clock, RealClock
from gpuvirt.controller.controller import Controller, ControllerDependencies, its_leases
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES
from gpuvirt.kube.kinds.gpunode import GPU_NODES
from gpuvirt.kube.kinds.kubevirt import DEVICE_KINDS, HYPER_CONVERGEDS, INSTANCETYPE_REVISIONS, KUBEVIRTS
from gpuvirt.kube.kinds.workloads import made_in
from gpuvirt.kube.resources import NODES, Resource, pods
from tests.agent.kubelet.kubeletnode import CLOCK
from tests.controller.observedcluster import SETTINGS
from tests.kube.mergepatch import merged_of
from tests.kube.scriptedapi import CONFLICT, NOT_FOUND, Call, Reply, ScriptedApi, scripted
from tests.web.certificates import Authority, Pair

Json = dict[str, object]
UNAVAILABLE: Reply = 503, {"kind": "Status", "message": "the server is starting", "code": 503}
OF_KUBEVIRT = (KUBEVIRTS, HYPER_CONVERGEDS, *(kind.collection.resource for kind in DEVICE_KINDS))
OPTIONAL = tuple(resource for resource in OF_KUBEVIRT if resource != INSTANCETYPE_REVISIONS.collection.resource)
"""The kinds of other products, which a cluster may lack."""


def installed_kinds(namespace: str) -> tuple[Resource, ...]:
    """Return the collections of a cluster on which gpuvirt is installed."""
    kinds = (NODES, GPU_NODES, CLUSTER_POLICIES, its_leases().resource, INSTANCETYPE_REVISIONS.collection.resource)
    lease = Resource("leases", "coordination.k8s.io", "v1", namespace)
    return (*kinds, lease, pods(namespace), *made_in(namespace))


class ServedCluster:
    """The objects by collection, and the requests by verb and plural name."""

    def __init__(self, namespace: str = SETTINGS.namespace) -> None:
        self._objects: dict[str, dict[str, Json]] = {resource.path: {} for resource in installed_kinds(namespace)}
        self._events: list[tuple[int, str, Json]] = []
        self._version = 1
        self._changed = asyncio.Event()
        self.has_groups = True
        """Whether the server answers which API groups it has."""
        self.requests: list[tuple[str, str]] = []
        """Each request: its verb, and its path without the query."""

    def install(self, *resources: Resource) -> None:
        """Add kinds without objects."""
        self._objects |= {resource.path: {} for resource in resources}

    def remove_kind(self, resource: Resource) -> None:
        """Remove a kind; its watches end."""
        del self._objects[resource.path]
        self._wake()

    def count(self, verb: str, resource: Resource) -> int:
        """Return how many requests of a verb there were for the objects of a kind."""
        return sum(asked == verb and path.startswith(resource.path) for asked, path in self.requests)

    def counted(self) -> Counter[tuple[str, str]]:
        """Return the number of requests by verb and path."""
        return Counter(self.requests)

    def stored(self, resource: Resource, name: str) -> Json | None:
        """Return an object."""
        return self._objects[resource.path].get(name)

    def put(self, resource: Resource, content: Mapping[str, object]) -> None:
        """Create or replace an object."""
        metadata = content["metadata"]
        assert isinstance(metadata, dict)
        self._store(resource.path, str(metadata["name"]), dict(content))

    def patch(self, resource: Resource, name: str, patch: Json) -> None:
        """Change an object, as another client does."""
        self._store(resource.path, name, merged_of(self._objects[resource.path][name], patch))

    def answer(self, call: Call) -> Reply:
        """Answer a request."""
        query = {key: values[0] for key, values in parse_qs(call.target.partition("?")[2]).items()}
        verb = "watch" if "watch" in query else call.method.lower()
        self.requests.append((verb, call.path))
        if call.path == "/apis":
            return (200, {"groups": list(self._groups())}) if self.has_groups else UNAVAILABLE
        if call.path in self._objects:
            return self._answer_collection(call, query)
        collection, _, name = call.path.removesuffix("/status").rpartition("/")
        return self._answer_object(call, collection, name) if collection in self._objects else NOT_FOUND

    def _answer_collection(self, call: Call, query: Mapping[str, str]) -> Reply:
        path = call.path
        if call.method == "POST":
            content: Json = json.loads(call.body)
            metadata = content["metadata"]
            assert isinstance(metadata, dict)
            return 201, self._store(path, str(metadata["name"]), content)
        if "watch" in query:
            initial = list(self._objects[path].values()) if "sendInitialEvents" in query else None
            version = self._version if initial is not None else int(query["resourceVersion"])
            return 200, self._watch(path, version, int(query["timeoutSeconds"]), initial)
        items, first = list(self._objects[path].values()), int(query.get("continue", "0"))
        after = first + int(query.get("limit", len(items)))
        more = {"continue": str(after)} if after < len(items) else {}
        return 200, {"metadata": {"resourceVersion": str(self._version), **more}, "items": items[first:after]}

    def _answer_object(self, call: Call, collection: str, name: str) -> Reply:
        found = self._objects[collection].get(name)
        is_apply = "apply-patch" in call.headers.get("content-type", "")
        if found is None and not (call.method == "PATCH" and is_apply):
            return NOT_FOUND
        if call.method == "PUT":
            return 200, self._store(collection, name, json.loads(call.body))
        if call.method == "DELETE":
            self._remove(collection, name)
            return 200, {}
        if call.method == "PATCH":
            return 200, self._store(collection, name, merged_of(found or {}, json.loads(call.body)))
        return (200, found) if call.method == "GET" else CONFLICT

    def _groups(self) -> Iterator[Json]:
        found: dict[str, list[str]] = {}
        for path in self._objects:
            _, kind, *parts = path.split("/")
            if kind == "apis" and parts[1] not in found.setdefault(parts[0], []):
                found[parts[0]].append(parts[1])
        for group, versions in found.items():
            known = [{"groupVersion": f"{group}/{version}", "version": version} for version in versions]
            yield {"name": group, "versions": known, "preferredVersion": known[0]}

    async def _watch(
        self, path: str, version: int, for_s: int, initial: Iterable[Json] | None
    ) -> AsyncIterator[object]:
        """Yield the events after a version, and end when the client has asked for it."""
        for content in initial or ():
            yield {"type": "ADDED", "object": content}
        if initial is not None:
            metadata = {"resourceVersion": str(version), "annotations": {"k8s.io/initial-events-end": "true"}}
            yield {"type": "BOOKMARK", "object": {"metadata": metadata}}
        ends_s = CLOCK.monotonic_s() + for_s
        while path in self._objects and (left_s := ends_s - CLOCK.monotonic_s()) > 0:
            changed = self._changed
            for at, where, event in self._events[bisect_right(self._events, version, key=itemgetter(0)) :]:
                version = at
                if where == path:
                    yield event
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()

    def _store(self, path: str, name: str, content: Json) -> Json:
        before = self._objects[path].get(name)
        self._version += 1
        namespace = path.rpartition("/namespaces/")[2].split("/")[0] if "/namespaces/" in path else ""
        metadata: Json = {"name": name, "uid": f"uid-{path}-{name}", "resourceVersion": str(self._version)}
        stored = merged_of(content, {"metadata": metadata | ({"namespace": namespace} if namespace else {})})
        self._objects[path][name] = stored
        self._events.append((self._version, path, {"type": "MODIFIED" if before else "ADDED", "object": stored}))
        self._wake()
        return stored

    def _remove(self, path: str, name: str) -> None:
        self._version += 1
        gone = merged_of(self._objects[path].pop(name), {"metadata": {"resourceVersion": str(self._version)}})
        self._events.append((self._version, path, {"type": "DELETED", "object": gone}))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@asynccontextmanager
async def serving(cluster: ServedCluster, authority: Authority, server: Pair) -> AsyncIterator[ScriptedApi]:
    """Serve a cluster as an API server does, with streaming lists."""
    async with scripted(cluster.answer, server, authority.certificate) as api:
        api.streams = api.ends_watches = True
        yield api


@asynccontextmanager
async def leading(
    api: ScriptedApi, authority: Authority, clock: Clock | None = None, settings: ControllerSettings = SETTINGS
) -> AsyncIterator[Controller]:
    """Run a controller that leads."""
    credentials = Credentials("127.0.0.1", api.port, "gpu-operator", ca=authority.certificate, token=b"x")
    random = Random(1)  # noqa: S311  a jitter
    dependencies = ControllerDependencies(Client(credentials), clock or RealClock(), random)
    controller = Controller(dependencies, settings)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(controller.run())
        try:
            yield controller
        finally:
            running.cancel()
