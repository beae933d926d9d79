"""ResourceSlices and ResourceClaims at an API server, as a script for `ScriptedApi`; it may drop fields."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import msgspec

from gpuvirt.agent.cluster.claimslices import SliceKeeper
from gpuvirt.agent.cluster.keeping import KeeperDependencies
from gpuvirt.facts.ids import PciAddress
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.kinds.resourceclaims import ResourceSlice
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.model.allocation.claims import DRIVER, Shape, device_name
from gpuvirt.model.reasons import Reason
from gpuvirt.plain import Plain
from tests.agent.node.simnode import SimNode
from tests.extender.podapi import serving
from tests.kube.scriptedapi import CONFLICT, NOT_FOUND, Call, Reply

SLICES, CLAIMS = "/apis/resource.k8s.io/v1/resourceslices", "/apis/resource.k8s.io/v1/resourceclaims"
Object = dict[str, Plain]


class SliceApi:
    """The objects, and how often slices were written."""

    def __init__(self) -> None:
        self.slices: dict[str, Object] = {}
        self.claims: list[Object] = []
        self.writes: list[str] = []
        self.drops: tuple[str, ...] = ()
        """The fields of devices that the API server drops, since their gates are off."""
        self.version = "v1.36.3"
        self._version = 0

    def answer(self, call: Call) -> Reply:
        """Answer a request."""
        if call.path == "/version":
            return 200, {"gitVersion": self.version}
        if call.path == CLAIMS:
            return 200, {"metadata": {"resourceVersion": "1"}, "items": self.claims}
        name = call.path.rpartition("/")[2]
        if call.method == "DELETE":
            self.writes.append(f"delete {name}")
            return (200, {}) if self.slices.pop(name, None) is not None else NOT_FOUND
        content: Object = json.loads(call.body)
        name = _name(content)
        if (call.method == "POST") is (name in self.slices):
            return CONFLICT
        self.writes.append(f"{call.method.lower()} {name}")
        return 200, self.put(content)

    def put(self, content: Object) -> Object:
        """Store a slice as an API server does: with a version, with the times of taints, without dropped fields."""
        stored = copy.deepcopy(content)
        self._version += 1
        metadata, spec = stored["metadata"], stored["spec"]
        assert isinstance(metadata, dict)
        assert isinstance(spec, dict)
        metadata |= {"resourceVersion": str(self._version), "uid": f"uid-{self._version}"}
        for device in spec.get("devices") or []:  # type: ignore[union-attr]
            for field in self.drops:
                device.pop(field, None)  # type: ignore[union-attr, arg-type, call-arg]
            for taint in device.get("taints") or []:  # type: ignore[union-attr]
                taint.setdefault("timeAdded", "2026-01-01T00:00:00Z")  # type: ignore[union-attr]
        self.slices[_name(stored)] = stored
        return stored

    def claim(self, name: str, gpu: PciAddress, pool: str = f"node01/{DRIVER}") -> None:
        """Let a scheduler give a GPU to a claim."""
        result: Object = {
            "request": "gpu",
            "driver": DRIVER,
            "pool": pool,
            "device": device_name(gpu, Shape.PASSTHROUGH),
        }
        status: Object = {"allocation": {"devices": {"results": [result]}}}
        self.claims.append(
            {"metadata": {"name": name, "namespace": "default", "uid": f"uid-of-{name}"}, "status": status}
        )

    @property
    def devices(self) -> Mapping[str, bool]:
        """The published devices, and whether each is tainted."""
        specs = [content["spec"] for _, content in sorted(self.slices.items())]
        return {
            str(device["name"]): bool(device.get("taints"))
            for spec in specs
            if isinstance(spec, dict) and isinstance(found := spec.get("devices"), list)
            for device in found
            if isinstance(device, dict)
        }


def _name(content: Object) -> str:
    metadata = content["metadata"]
    assert isinstance(metadata, dict)
    return str(metadata["name"])


class Publisher:
    """The keeper of one node's slices, which looks when the test says so."""

    def __init__(self, api: SliceApi, node: SimNode, keeper: SliceKeeper) -> None:
        self._api, self._node, self._keeper = api, node, keeper

    async def look(self) -> Reason | None:
        """Let the keeper see the slices as they are, and act."""
        self.observe()
        await self._node.report_account()
        reason = await self._keeper.look()
        await self._node.settle()
        return reason

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let the keeper look by itself."""
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(self._keeper.run(lambda _: None, lambda _: None))
            yield
            keeping.cancel()

    def observe(self) -> None:
        """Let the keeper see the slices as they are."""
        found = [
            msgspec.json.decode(msgspec.json.encode(content), type=ResourceSlice)
            for content in self._api.slices.values()
        ]
        self._keeper.observe(Delta({ObjectKey("", item.metadata.name): item for item in found}))


@asynccontextmanager
async def publishing(api: SliceApi, node: SimNode, folder: Path) -> AsyncIterator[Publisher]:
    """Keep the slices of a node at an API server."""
    assert node.agent.publishing is not None
    async with serving(api.answer, folder) as served:
        dependencies = KeeperDependencies(served.client, "node01", node.clock, Random(1))  # noqa: S311
        keeper = SliceKeeper(dependencies, node.agent.publishing)
        keeper.observe_node("uid-of-node01")
        yield Publisher(api, node, keeper)
