"""An API server with nodes, pods and leases: it lists, watches and binds over HTTPS, and fails as tests ask for.

A Binding is made as Kubernetes makes it (pkg/registry/core/pod/storage/storage.go): its UID and its version are
preconditions, a pod has one node for ever, and the annotations are merged in the same write.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client
from tests.extender.namedobjects import NamedObjects, Object
from tests.kube.scriptedapi import CONFLICT, NOT_FOUND, Call, Reply, ScriptedApi, scripted
from tests.web.certificates import Authority

ENDED = ("Succeeded", "Failed")
LISTED = (
    "/api/v1/pods",
    "/api/v1/nodes",
    "/apis/policy/v1/poddisruptionbudgets",
    "/apis/node.k8s.io/v1/runtimeclasses",
)


@dataclass
class Lease:
    """Whether a replica leads."""

    held: bool = True

    def is_held(self) -> bool:
        return self.held


@dataclass
class Faults:
    """The faults of the API server at the next bindings, in turn."""

    after_write: list[Reply] = field(default_factory=list)
    """Answers in place of the true one; the write is made."""
    before_write: list[Reply] = field(default_factory=list)
    """Answers in place of a write."""
    delayed: int = 0
    """How many of the next bindings arrive only when the test lets them (`PodApi.late`); they are answered at once."""
    meanwhile: list[Callable[[], None]] = field(default_factory=list)
    """The functions that are called when the next bindings arrive, one for each binding."""
    silent: bool = False
    """Whether bindings are made and never answered."""
    changes_fail: bool = False
    """Whether pods cannot be changed."""
    unchangeable: set[str] = field(default_factory=set)
    """The pods that a webhook lets nobody change."""
    reads_fail: bool = False
    """Whether single pods cannot be read."""


class PodApi:
    """The objects of the API server, as a script for `ScriptedApi`."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.bindings: list[Object] = []
        """The bodies of all requests for a binding."""
        self.late: list[tuple[Object, str]] = []
        """Bindings that were answered by an error before they arrived, with the pods."""
        self.changed: list[str] = []
        """The pods that were changed through their status."""
        self.pods: dict[str, Object] = {}
        self.nodes: dict[str, Object] = {}
        self.budgets: dict[str, Object] = {}
        self.runtime_classes: dict[str, Object] = {}
        self.budgets_reply: Reply | None = None
        """The answer to all requests for PodDisruptionBudgets, where they fail."""
        self.leases = NamedObjects(self._stamp)
        self.services = NamedObjects(self._stamp)
        self.endpoint_slices = NamedObjects(self._stamp)
        self.watches_lag = False
        """Whether the watches that are open report nothing more."""
        self._version = 10
        self._events: dict[str, list[Object]] = {path.rpartition("/")[2]: [] for path in LISTED}
        self._changed = asyncio.Event()

    def put(self, kind: str, content: Object) -> None:
        """Add or replace a node, a pod or a PodDisruptionBudget."""
        stored = copy.deepcopy(content)
        key = _key(stored)
        objects = self._objects(kind)
        was_listed = key in objects and _is_listed(objects[key])
        objects[key] = stored
        self._stamp(stored)
        if _is_listed(stored):
            self._report(kind, "MODIFIED" if was_listed else "ADDED", stored)
        elif was_listed:
            self._report(kind, "DELETED", stored)

    def delete(self, kind: str, key: str) -> None:
        """Delete a node (`node01`) or a pod (`default/p`)."""
        removed = self._objects(kind).pop(key)
        self._stamp(removed)
        self._report(kind, "DELETED", removed)

    def annotations(self, key: str) -> dict[str, str]:
        """Return the annotations of a pod."""
        return msgspec.convert(_part(self.pods[key], "metadata").get("annotations") or {}, dict[str, str])

    def node_of(self, key: str) -> object:
        """Return the node of a pod; empty for one that is not bound."""
        return _part(self.pods[key], "spec").get("nodeName", "")

    def answer(self, call: Call) -> Reply:
        """Answer a request."""
        parts = call.path.strip("/").split("/")
        for kind, named in (
            ("leases", self.leases),
            ("services", self.services),
            ("endpointslices", self.endpoint_slices),
        ):
            if kind in parts:
                return named.answer(call)
        if call.path in LISTED:
            kind = parts[-1]
            if kind == "poddisruptionbudgets" and self.budgets_reply is not None:
                return self.budgets_reply
            return 200, self._watch(kind, call) if "watch=1" in call.target else self._list(kind)
        if parts[-1] == "binding":
            return self._bind(call, f"{parts[3]}/{parts[5]}")
        if parts[-1] == "status" and call.method == "PATCH":
            return self._patch(call, f"{parts[3]}/{parts[5]}")
        if len(parts) == 6 and parts[4] == "pods":
            if self.faults.reads_fail:
                return 500, {"message": "etcdserver: request timed out"}
            found = self.pods.get(f"{parts[3]}/{parts[5]}")
            return (200, found) if found is not None else NOT_FOUND
        return NOT_FOUND

    def _bind(self, call: Call, key: str) -> Reply:
        content = msgspec.json.decode(call.body, type=dict[str, object])
        self.bindings.append(content)
        if self.faults.meanwhile:
            self.faults.meanwhile.pop(0)()
        if self.faults.before_write:
            return self.faults.before_write.pop(0)
        if self.faults.delayed:
            self.faults.delayed -= 1
            self.late.append((content, key))
            return 500, {"message": "etcdserver: request timed out"}
        reply = self._bound(content, key)
        if self.faults.silent:
            return 200, _silence()
        return self.faults.after_write.pop(0) if self.faults.after_write else reply

    def arrive(self) -> list[int]:
        """Let the late bindings arrive, and return the statuses of their answers."""
        late, self.late = self.late, []
        return [self._bound(content, key)[0] for content, key in late]

    def _patch(self, call: Call, key: str) -> Reply:
        """Merge annotations into a pod whose UID and version are still those of the patch."""
        if self.faults.changes_fail:
            return 500, {"message": "etcdserver: request timed out"}
        pod, content = self.pods.get(key), msgspec.json.decode(call.body, type=dict[str, object])
        if pod is None:
            return NOT_FOUND
        if key in self.faults.unchangeable:
            return 403, {"message": 'admission webhook "frozen.example.com" denied the request'}
        if not _is_at(_part(pod, "metadata"), _part(content, "metadata")):
            return CONFLICT
        changed = copy.deepcopy(pod)
        given = msgspec.convert(_part(content, "metadata")["annotations"], dict[str, str])
        _part(changed, "metadata")["annotations"] = {**self.annotations(key), **given}
        self.changed.append(key)
        self.put("pods", changed)
        return 200, self.pods[key]

    def _bound(self, content: Object, key: str) -> Reply:
        pod = self.pods.get(key)
        if pod is None:
            return NOT_FOUND
        metadata, given = _part(pod, "metadata"), _part(content, "metadata")
        if not _is_at(metadata, given) or "deletionTimestamp" in metadata:
            return CONFLICT
        if _part(pod, "spec").get("nodeName"):
            return 409, {"kind": "Status", "message": f"pod {key} is already assigned to a node", "code": 409}
        changed = copy.deepcopy(pod)
        merged = {**self.annotations(key), **msgspec.convert(given.get("annotations", {}), dict[str, str])}
        _part(changed, "metadata")["annotations"] = merged
        _part(changed, "spec")["nodeName"] = _part(content, "target")["name"]
        self.put("pods", changed)
        return 201, {"kind": "Status", "status": "Success"}

    def _objects(self, kind: str) -> dict[str, Object]:
        known = {"pods": self.pods, "nodes": self.nodes, "runtimeclasses": self.runtime_classes}
        return known.get(kind, self.budgets)

    def _stamp(self, content: Object) -> None:
        self._version += 1
        _part(content, "metadata")["resourceVersion"] = str(self._version)

    def _report(self, kind: str, event: str, content: Object) -> None:
        self._events[kind].append({"type": event, "object": copy.deepcopy(content)})
        self._changed.set()
        self._changed = asyncio.Event()

    def _list(self, kind: str) -> object:
        items = [stored for stored in self._objects(kind).values() if _is_listed(stored)]
        return {"metadata": {"resourceVersion": str(self._version)}, "items": copy.deepcopy(items)}

    async def _watch(self, kind: str, call: Call) -> AsyncIterator[object]:
        since = int(call.target.partition("resourceVersion=")[2].partition("&")[0])
        number = 0
        lags = self.watches_lag
        while True:
            changed, events = self._changed, self._events[kind]
            if self.watches_lag and not lags:
                await _forever()
            for event in events[number:]:
                if int(_version_of(_part(event, "object"))) > since:
                    yield event
            number = len(events)
            await changed.wait()


def _is_listed(content: Object) -> bool:
    status = content.get("status")
    return not (isinstance(status, dict) and status.get("phase") in ENDED)


def _part(content: Object, name: str) -> Object:
    part = content[name]
    assert isinstance(part, dict)
    return part


def _is_at(metadata: Object, given: Object) -> bool:
    """Return whether an object has the UID and the version that a write needs."""
    return all(metadata[field] == given.get(field, metadata[field]) for field in ("uid", "resourceVersion"))


def _key(content: Object) -> str:
    metadata = _part(content, "metadata")
    return f"{metadata['namespace']}/{metadata['name']}" if "namespace" in metadata else str(metadata["name"])


def _version_of(content: Object) -> str:
    return str(_part(content, "metadata")["resourceVersion"])


async def _silence() -> AsyncIterator[object]:
    await _forever()
    yield {}


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True)
class Served:
    """A running API server."""

    server: ScriptedApi
    kubeconfig: Path

    @property
    def client(self) -> Client:
        return Client(from_kubeconfig(self.kubeconfig))


@asynccontextmanager
async def serving(answer: Callable[[Call], Reply], folder: Path) -> AsyncIterator[Served]:
    """Serve objects, and write a kubeconfig."""
    authority = Authority(folder)
    server = authority.server("api", alternatives="IP:127.0.0.1")
    async with scripted(answer, server, authority.certificate) as served:
        path = folder / "kubeconfig"
        path.write_text(f"""
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u, namespace: gpuvirt}}}}]
clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:{served.port}', certificate-authority: authority.crt}}}}]
users: [{{name: u, user: {{token: abc}}}}]
""")
        yield Served(served, path)
