"""An API server with one schedule, its workers and their pods, over HTTPS: it merges patches and checks versions."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from urllib.parse import parse_qs, urlsplit

from tests.kube.mergepatch import merged_of
from tests.kube.scriptedapi import CONFLICT, NOT_FOUND, Call, Reply

Object = dict[str, object]
SCHEDULES = "/apis/gpuvirt.io/v1alpha1/namespaces/gpuvirt/vgpuschedules"
ALL_SCHEDULES = "/apis/gpuvirt.io/v1alpha1/vgpuschedules"
NODES, PODS = "/api/v1/nodes", "/api/v1/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
ATTACHMENTS = "/apis/storage.k8s.io/v1/volumeattachments"
BLOCKED: Reply = 429, {"kind": "Status", "message": "Cannot evict pod as it would violate its budget", "code": 429}
FORBIDDEN: Reply = 403, {"kind": "Status", "message": "configmaps is forbidden", "code": 403}
EVENTS = "/apis/events.k8s.io/v1/namespaces/gpuvirt/events"
CONFIG_MAPS = "/api/v1/configmaps"
MACHINE_API = "/apis/machine.openshift.io/v1beta1/namespaces/openshift-machine-api"
CLUSTER_API = "/apis/cluster.x-k8s.io/v1beta1/namespaces/fleet"
CHECKS = (f"{MACHINE_API}/machinehealthchecks", f"{CLUSTER_API}/machinehealthchecks")
LISTS = (ALL_SCHEDULES, SCHEDULES, NODES, PODS, LEASES, ATTACHMENTS, CONFIG_MAPS)
SECRETS = "/api/v1/namespaces/gpuvirt/secrets"


class ServedSchedule:
    """The objects by path."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.version = 1
        self.budget_allows = True
        self.may_evict = True
        self.events: list[Object] = []
        self.writes: list[str] = []
        """Writes other than those of events."""
        self.lists: list[str] = []
        self.watches = 0
        self.kinds: set[str] = set()
        """The collections of optional kinds that the server has."""
        self.forbidden: set[str] = set()
        self._watching: list[tuple[str, asyncio.Queue[Object]]] = []

    def put(self, path: str, content: Object) -> None:
        """Store an object with a new version."""
        self.version += 1
        metadata = {"uid": f"uid-{path.rpartition('/')[2]}", **_fields(content, "metadata")}
        metadata |= {"name": path.rpartition("/")[2], "resourceVersion": str(self.version)}
        if "/vgpuschedules/" in path:
            metadata["namespace"] = path.split("/")[-3]
        self.objects[path] = {**content, "metadata": metadata}
        for collection, queue in self._watching:
            if _is_in(path, collection):
                queue.put_nowait({"type": "MODIFIED", "object": self.objects[path]})

    def delete(self, path: str) -> None:
        """Delete an object."""
        self.version += 1
        found = self.objects.pop(path)
        found["metadata"] = {**_fields(found, "metadata"), "resourceVersion": str(self.version)}
        for collection, queue in self._watching:
            if _is_in(path, collection):
                queue.put_nowait({"type": "DELETED", "object": found})

    def answer(self, call: Call) -> Reply:
        """Answer one request."""
        if call.method == "GET":
            return self._get(call)
        if call.path == EVENTS:
            event: Object = json.loads(call.body)
            self.events.append(event)
            return 201, event
        self.writes.append(f"{call.method} {call.path}")
        if call.method == "POST" and call.path.endswith("/eviction"):
            return self._evict(call)
        path = call.path.removesuffix("/status")
        found = self.objects.get(path)
        if found is None:
            return NOT_FOUND
        sent: Object = json.loads(call.body)
        asked = _fields(sent, "metadata").get("resourceVersion")
        if asked is not None and asked != _fields(found, "metadata")["resourceVersion"]:
            return CONFLICT
        self.put(path, merged_of(found, sent))
        return 200, self.objects[path]

    def _get(self, call: Call) -> Reply:
        if call.path in self.forbidden:
            return FORBIDDEN
        if call.path not in LISTS and call.path not in self.kinds:
            found = self.objects.get(call.path)
            return (200, found) if found is not None else NOT_FOUND
        query = parse_qs(urlsplit(call.target).query)
        if "watch" in query:
            self.watches += 1
            return 200, self._watch(call.path)
        self.lists.append(call.path)
        selector, field = query.get("labelSelector", [""])[0], query.get("fieldSelector", [""])[0]
        items = [
            item
            for path, item in self.objects.items()
            if _is_in(path, call.path) and has_labels(item, selector) and _is_on(item, field)
        ]
        return 200, {"metadata": {"resourceVersion": str(self.version)}, "items": items}

    async def _watch(self, path: str) -> AsyncIterator[Object]:
        queue = asyncio.Queue[Object]()
        self._watching.append((path, queue))
        while True:
            yield await queue.get()

    def _evict(self, call: Call) -> Reply:
        if not self.may_evict:
            return FORBIDDEN
        if not self.budget_allows:
            return BLOCKED
        name = call.path.split("/")[-2]
        found = self.objects.get(f"/api/v1/namespaces/default/pods/{name}")
        asked = json.loads(call.body)["deleteOptions"]["preconditions"]["uid"]
        if found is None or _fields(found, "metadata")["uid"] != asked:
            return NOT_FOUND
        del self.objects[f"/api/v1/namespaces/default/pods/{name}"]
        return 201, {"kind": "Status", "status": "Success"}


def _is_in(path: str, collection: str) -> bool:
    """Return whether an object is in a collection, of its namespace or of all."""
    folder = path.rpartition("/")[0]
    everywhere = {PODS: "/pods", ALL_SCHEDULES: "/vgpuschedules", CONFIG_MAPS: "/configmaps"}
    return folder == collection or (collection in everywhere and folder.endswith(everywhere[collection]))


def _fields(content: Object, name: str) -> Object:
    found = content.get(name, {})
    assert isinstance(found, dict)
    return found


def has_labels(item: Object, selector: str) -> bool:
    labels = _fields(_fields(item, "metadata"), "labels")
    return all(labels.get(key) == value for key, value in _pairs(selector))


def _is_on(item: Object, field: str) -> bool:
    for key, value in _pairs(field):
        section, _, name = key.removesuffix("!").partition(".")
        if (_fields(item, section).get(name) == value) is key.endswith("!"):
            return False
    return True


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for pair in text.split(",") if text else ():
        key, _, value = pair.partition("=")
        yield key, value
