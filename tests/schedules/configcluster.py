"""An API server with nodes that have GPUs of their own, and a controller that runs schedules against it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from urllib.parse import parse_qs

import msgspec
from typing_extensions import override

from gpuvirt.clock import RealClock
from gpuvirt.controller.process import ControllerOptions, ControllerProcess
from gpuvirt.controller.schedulespart import load_schedules
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES
from gpuvirt.kube.kinds.gpunode import GPU_NODES
from gpuvirt.kube.kinds.vgpuschedule import ALL_SCHEDULES, vgpu_schedules
from gpuvirt.kube.resources import NODES, Resource, config_maps
from tests.controller.observedcluster import ALL_ON, SETTINGS, node
from tests.controller.servedcluster import UNAVAILABLE, Json, ServedCluster, serving
from tests.kube.scriptedapi import Call, Reply
from tests.web.certificates import Authority, Pair

NAMESPACE = SETTINGS.namespace
SCHEDULES = vgpu_schedules(NAMESPACE)
EVENTS = Resource("events", "events.k8s.io", "v1", NAMESPACE)
SPEC: Json = {
    "phases": [
        {
            "name": "day",
            "start": "0 7 * * *",
            "nodes": {"matchLabels": {"nvidia.com/pool": "vgpu"}},
            "vgpuConfig": "A10-4Q",
        },
        {
            "name": "night",
            "start": "0 20 * * *",
            "nodes": {"matchLabels": {"nvidia.com/pool": "vgpu"}},
            "vgpuConfig": "A10-24Q",
        },
    ]
}


class ConfigCluster(ServedCluster):
    """The cluster: it selects by labels, shows a namespace's schedules to all, and counts generations of GpuNodes."""

    def __init__(self) -> None:
        super().__init__(NAMESPACE)
        self._written: list[Json] = []
        """The events; their names are of their times, and the clock may stand."""
        self.hides_schedules = False
        """Whether the schedules of the namespace can't be read."""
        self.install(SCHEDULES, ALL_SCHEDULES, EVENTS)
        self.put(CLUSTER_POLICIES, {"metadata": {"name": "cluster-policy", "generation": 1}, "spec": ALL_ON})

    def put_policy(self, config_map: str) -> None:
        """Have the ClusterPolicy name a ConfigMap of vGPU configs."""
        manager = {"enabled": True, "config": {"name": config_map}}
        metadata = {"name": "cluster-policy", "generation": 2}
        self.put(CLUSTER_POLICIES, {"metadata": metadata, "spec": {**ALL_ON, "vgpuDeviceManager": manager}})

    def put_configs(self, config_map: str, text: str) -> None:
        """Put the ConfigMap of vGPU configs."""
        metadata = {"name": config_map, "namespace": NAMESPACE}
        self.put(config_maps(NAMESPACE), {"metadata": metadata, "data": {"config.yaml": text}})

    def put_node(self, name: str, **labels: str) -> None:
        """Put a node in mode vgpu; the labels are of `nvidia.com`."""
        self.put(NODES, msgspec.to_builtins(node("vm-vgpu", name, **labels)))

    def put_schedule(self, name: str, generation: int = 1, spec: Json = SPEC, **more: object) -> None:
        """Put a schedule with the status that it has."""
        before = self.stored(SCHEDULES, name) or {}
        metadata = {"name": name, "generation": generation}
        self.put(SCHEDULES, {**before, "metadata": metadata, "spec": {**spec, **more}})

    def config(self, name: str) -> tuple[object, object]:
        """Return the vGPU config of a GpuNode, with its origin."""
        spec = (self.stored(GPU_NODES, name) or {}).get("spec")
        assert spec is None or isinstance(spec, dict)
        return (spec["vgpuConfig"], spec["origins"]["vgpuConfig"]) if spec else (None, None)

    def report(self, name: str, ready: str, reason: str, message: str = "") -> None:
        """Report as the agent of a node: what it makes of the newest spec."""
        found = self.stored(GPU_NODES, name)
        assert found is not None
        metadata = found["metadata"]
        assert isinstance(metadata, dict)
        at = "2026-01-05T00:00:00Z"
        condition = {"type": "Ready", "status": ready, "reason": reason, "message": message, "lastTransitionTime": at}
        status = {"observedGeneration": metadata["generation"], "conditions": [condition]}
        self.patch(GPU_NODES, name, {"status": status})

    def nodes(self, schedule: str) -> list[tuple[object, ...]]:
        """Return the nodes of a schedule's status: name, phase, vGPU config, whether it is applied, and the code."""
        status = (self.stored(SCHEDULES, schedule) or {}).get("status") or {}
        assert isinstance(status, dict)
        fields = ("node", "phase", "vgpuConfig", "applied", "code")
        return [tuple(entry.get(field) for field in fields) for entry in status.get("nodes", ())]

    def condition(self, schedule: str, name: str = "Ready") -> tuple[object, object] | None:
        """Return status and reason of a condition of a schedule; None if it has none yet."""
        status = (self.stored(SCHEDULES, schedule) or {}).get("status") or {}
        assert isinstance(status, dict)
        found = [entry for entry in status.get("conditions", ()) if entry["type"] == name]
        return (found[0]["status"], found[0]["reason"]) if found else None

    def events(self) -> set[object]:
        """Return the reasons of the events that were written."""
        return {event["reason"] for event in self._written}

    def remove_schedule(self, name: str) -> None:
        """Delete a schedule."""
        self._remove(SCHEDULES.path, name)
        self._remove(ALL_SCHEDULES.path, name)

    def put_elsewhere(self, name: str, namespace: str) -> None:
        """Put a schedule of another namespace."""
        metadata = {"name": name, "namespace": namespace, "generation": 1}
        self.put(ALL_SCHEDULES, {"metadata": metadata, "spec": SPEC})

    @override
    def answer(self, call: Call) -> Reply:
        if self.hides_schedules and call.path == SCHEDULES.path:
            return UNAVAILABLE
        if call.path == EVENTS.path and call.method == "POST":
            self._written.append(json.loads(call.body))
        reply = super().answer(call)
        selector = parse_qs(call.target.partition("?")[2]).get("labelSelector", [""])[0]
        if call.path != NODES.path or not selector or not isinstance(reply[1], dict):
            return reply
        pairs = dict(pair.split("=", 1) for pair in selector.split(","))
        items = [item for item in reply[1]["items"] if pairs.items() <= item["metadata"].get("labels", {}).items()]
        return reply[0], {**reply[1], "items": items}

    @override
    def _store(self, path: str, name: str, content: Json) -> Json:
        if path == GPU_NODES.path:
            before = self._objects[path].get(name) or {}
            metadata = before.get("metadata") or {}
            assert isinstance(metadata, dict)
            generation = metadata.get("generation", 0) + (content.get("spec") != before.get("spec"))
            own = content.get("metadata")
            assert isinstance(own, dict)
            content = {**content, "metadata": {**own, "generation": generation}}
        stored = super()._store(path, name, content)
        if path == SCHEDULES.path:
            self._objects[ALL_SCHEDULES.path][name] = stored
            kind = "MODIFIED"
            self._events.append((self._version, ALL_SCHEDULES.path, {"type": kind, "object": stored}))
        return stored


class WallClock(RealClock):
    """A clock whose wall time stands until it is set."""

    def __init__(self, at: datetime) -> None:
        super().__init__()
        self.wall = at

    @override
    def now(self) -> datetime:
        return self.wall


@asynccontextmanager
async def scheduling(
    cluster: ConfigCluster, clock: WallClock, authority: Authority, server: Pair
) -> AsyncIterator[ControllerProcess]:
    """Run a controller that leads, and runs schedules."""
    async with serving(cluster, authority, server) as api:
        credentials = Credentials("127.0.0.1", api.port, "gpu-operator", ca=authority.certificate, token=b"x")
        options = ControllerOptions(credentials, SETTINGS, elects=False, schedules=load_schedules(), clock=clock)
        process = ControllerProcess(options)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(process.run())
            try:
                yield process
            finally:
                task.cancel()


def before(at: datetime, seconds: float) -> datetime:
    """Return a moment before another."""
    return at - timedelta(seconds=seconds)
