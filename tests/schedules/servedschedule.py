"""An API server with one schedule, its workers and their pods, over HTTPS: it merges patches and checks versions."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from urllib.parse import parse_qs, urlsplit

from tests.scriptedapi import CONFLICT, NOT_FOUND, Call, Reply

Object = dict[str, object]
SCHEDULES = "/apis/gpuvirt.io/v1alpha1/namespaces/gpuvirt/vgpuschedules"
NODES, PODS = "/api/v1/nodes", "/api/v1/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
ATTACHMENTS = "/apis/storage.k8s.io/v1/volumeattachments"
BLOCKED: Reply = 429, {"kind": "Status", "message": "Cannot evict pod as it would violate its budget", "code": 429}
LISTS = (SCHEDULES, NODES, PODS, LEASES, ATTACHMENTS)


class ServedSchedule:
    """The objects by path."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.version = 1
        self.budget_allows = True
        self.writes: list[str] = []
        self.lists: list[str] = []
        self.watches = 0
        self._watching: list[tuple[str, asyncio.Queue[Object]]] = []

    def put(self, path: str, content: Object) -> None:
        """Store an object with a new version."""
        self.version += 1
        metadata = {"uid": f"uid-{path.rpartition('/')[2]}", **_fields(content, "metadata")}
        metadata |= {"name": path.rpartition("/")[2], "resourceVersion": str(self.version)}
        if path.startswith(SCHEDULES):
            metadata["namespace"] = "gpuvirt"
        self.objects[path] = {**content, "metadata": metadata}
        for collection, queue in self._watching:
            if collection == _collection(path):
                queue.put_nowait({"type": "MODIFIED", "object": self.objects[path]})

    def answer(self, call: Call) -> Reply:
        """Answer one request."""
        if call.method == "GET":
            return self._get(call)
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
        merged = _merged(found, sent)
        assert isinstance(merged, dict)
        self.put(path, merged)
        return 200, self.objects[path]

    def _get(self, call: Call) -> Reply:
        if call.path not in LISTS:
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
            if _collection(path) == call.path and _has_labels(item, selector) and _is_on(item, field)
        ]
        return 200, {"metadata": {"resourceVersion": str(self.version)}, "items": items}

    async def _watch(self, path: str) -> AsyncIterator[Object]:
        queue = asyncio.Queue[Object]()
        self._watching.append((path, queue))
        while True:
            yield await queue.get()

    def _evict(self, call: Call) -> Reply:
        if not self.budget_allows:
            return BLOCKED
        name = call.path.split("/")[-2]
        found = self.objects.get(f"/api/v1/namespaces/default/pods/{name}")
        asked = json.loads(call.body)["deleteOptions"]["preconditions"]["uid"]
        if found is None or _fields(found, "metadata")["uid"] != asked:
            return NOT_FOUND
        del self.objects[f"/api/v1/namespaces/default/pods/{name}"]
        return 201, {"kind": "Status", "status": "Success"}


def _collection(path: str) -> str:
    folder = path.rpartition("/")[0]
    return PODS if folder.endswith("/pods") else folder


def _fields(content: Object, name: str) -> Object:
    found = content.get(name, {})
    assert isinstance(found, dict)
    return found


def _has_labels(item: Object, selector: str) -> bool:
    labels = _fields(_fields(item, "metadata"), "labels")
    return all(labels.get(key) == value for key, value in _pairs(selector))


def _is_on(item: Object, field: str) -> bool:
    return all(_fields(item, "spec").get("nodeName") == value for _, value in _pairs(field))


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for pair in text.split(",") if text else ():
        key, _, value = pair.partition("=")
        yield key, value


def _merged(before: object, patch: object) -> object:
    """Return a merge patch's result (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result
