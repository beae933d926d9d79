"""A kubelet's device manager: what it counts, what it has allocated, and how it chooses devices.

After pkg/kubelet/cm/devicemanager of Kubernetes 1.36: unhealthy devices count as capacity; a resource whose plugin has
disconnected keeps its capacity for five minutes, with nothing allocatable; after a restart a resource counts nothing
until its plugin registers again; the devices of an init container go to the pod's other containers first; a pod that
requests an unknown resource is admitted, without devices.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import grpc
import grpc.aio
import msgspec

from gpuvirt.agent.kubelet.checkpoint import Data, PodDevices, parse
from gpuvirt.errors import GpuvirtError
from gpuvirt_sim.kubelet import checkpoint

STOP_GRACE_S = 300.0

Prefer = Callable[[Sequence[str], Sequence[str], int], Awaitable[Sequence[str]]]
"""Asks a plugin for its preference: of the available devices, including these, this many."""

Allocate = Callable[[Sequence[str]], Awaitable[bytes]]
"""Asks a plugin for devices, and returns its serialised answer."""


class AdmissionError(GpuvirtError):
    """A pod can't be admitted; the text is that of the pod's status."""


class Endpoint(msgspec.Struct):
    """A registered plugin."""

    stopped_at_s: float | None = None


class Resource(msgspec.Struct):
    """The state of one resource."""

    endpoint: Endpoint = msgspec.field(default_factory=Endpoint)
    healthy: set[str] = msgspec.field(default_factory=set)
    unhealthy: set[str] = msgspec.field(default_factory=set)
    numa_nodes: dict[str, int | None] = msgspec.field(default_factory=dict)


class Consumers(msgspec.Struct, frozen=True):
    """The devices of one resource that one container has, and the plugin's answer for them."""

    pod_uid: str
    container: str
    resource: str
    by_node: Mapping[str, list[str]]
    answer: bytes

    @property
    def devices(self) -> list[str]:
        """The devices of all NUMA nodes."""
        return [device for devices in self.by_node.values() for device in devices]


class KubeletPanicError(Exception):
    """The kubelet has ended: it looks up the devices of an answer in the plugin's last list, and expects them there.

    Seen with Kubernetes 1.36.3 (manager.go:923 allocateContainerResources); `allDevices` has pointers.
    """


class DeviceManager:
    """The device manager's resources and allocations."""

    def __init__(self, stored: bytes | None = None, now_s: float = 0.0) -> None:
        """`stored` is the checkpoint of an earlier run."""
        self.resources: dict[str, Resource] = {}
        self.held: list[Consumers] = []
        self._reusable: tuple[str, dict[str, list[str]]] = ("", {})
        if stored is not None:
            self._restore(parse(stored).data, now_s)

    def connected(self, resource: str) -> None:
        """Record that a plugin has registered, and answers."""
        self.resources.setdefault(resource, Resource()).endpoint = Endpoint()

    def updated(self, resource: str, healthy: Mapping[str, int | None], unhealthy: Mapping[str, int | None]) -> None:
        """Record a plugin's list: devices with their NUMA nodes."""
        known = self.resources.setdefault(resource, Resource())
        known.healthy, known.unhealthy = set(healthy), set(unhealthy)
        known.numa_nodes = {**unhealthy, **healthy}

    def disconnected(self, resource: str, now_s: float) -> None:
        """Record that a stream has ended; the resource's current plugin counts as stopped, even if it is newer."""
        known = self.resources.get(resource)
        if known is not None:
            known.unhealthy |= known.healthy
            known.healthy = set()
            known.endpoint.stopped_at_s = now_s

    def capacity(self, now_s: float) -> Mapping[str, int]:
        """Return how many devices of each resource the node has."""
        self._forget_stopped(now_s)
        return {name: len(known.healthy) + len(known.unhealthy) for name, known in sorted(self.resources.items())}

    def allocatable(self, now_s: float) -> Mapping[str, int]:
        """Return how many devices of each resource pods can get."""
        self._forget_stopped(now_s)
        return {name: len(known.healthy) for name, known in sorted(self.resources.items())}

    def has_resource(self, resource: str) -> bool:
        """Return whether a plugin offers the resource, or a pod has a device of it."""
        return resource in self.resources or any(held.resource == resource for held in self.held)

    async def give(
        self, pod_uid: str, container: str, resource: str, count: int, prefer: Prefer, allocate: Allocate
    ) -> Consumers:
        """Allocate devices of one resource to a container; raise AdmissionError where that fails."""
        if self._reusable[0] != pod_uid:
            self._reusable = (pod_uid, {})
        chosen = await self._choose(resource, count, prefer)
        try:
            answer = await allocate(chosen)
        except Exception as error:
            raise AdmissionError(f"Allocate failed due to {_rpc_text(error)}, which is unexpected") from error
        nodes = self.resources[resource].numa_nodes
        if gone := set(chosen) - nodes.keys():
            raise KubeletPanicError(f"no list of {resource} has {', '.join(sorted(gone))}: nil pointer dereference")
        by_node: dict[str, list[str]] = {}
        for device in chosen:
            node = nodes.get(device)
            by_node.setdefault(checkpoint.NO_TOPOLOGY if node is None else str(node), []).append(device)
        held = Consumers(pod_uid, container, resource, by_node, answer)
        others = [other for other in self.held if held_key(other) != held_key(held)]
        self.held = [*others, held]
        return held

    def keep_for_reuse(self, held: Consumers) -> None:
        """Let the pod's next container have the devices of an init container that has ended."""
        self._reusable[1].setdefault(held.resource, []).extend(held.devices)

    def free_all_but(self, pod_uids: Iterable[str]) -> None:
        """Free the devices of all other pods."""
        alive = set(pod_uids)
        self.held = [held for held in self.held if held.pod_uid in alive]

    def checkpoint(self) -> bytes:
        """Return the current content of the checkpoint."""
        entries = [
            PodDevices(held.pod_uid, held.container, held.resource, dict(held.by_node), held.answer)
            for held in self.held
        ]
        registered = {name: sorted(known.healthy) for name, known in sorted(self.resources.items())}
        return checkpoint.encode(Data(entries or None, registered))

    async def _choose(self, resource: str, count: int, prefer: Prefer) -> list[str]:
        known = self.resources.get(resource)
        if known is None:
            raise AdmissionError(f"cannot allocate unregistered device {resource}")
        if not known.healthy:
            raise AdmissionError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        reusable = self._reusable[1].pop(resource, [])
        chosen = reusable[:count]
        self._reusable[1][resource] = reusable[count:]
        missing = count - len(chosen)
        if not missing:
            return chosen
        used = {device for held in self.held if held.resource == resource for device in held.devices}
        available = sorted(known.healthy - used)
        if len(available) < missing:
            raise AdmissionError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {missing}, Available: {len(available)}"
            )
        if known.endpoint.stopped_at_s is not None:
            raise AdmissionError(f"endpoint {resource} has been stopped")
        try:
            preferred = await prefer(sorted({*available, *chosen}), chosen, count)
        except grpc.aio.AioRpcError as error:
            why = f"device plugin GetPreferredAllocation rpc failed with err: {_rpc_text(error)}"
            raise AdmissionError(why) from error
        ranked = [*(device for device in preferred if device in available), *available]
        return [*chosen, *list(dict.fromkeys(ranked))[:missing]]

    def _forget_stopped(self, now_s: float) -> None:
        for name, known in list(self.resources.items()):
            stopped_s = known.endpoint.stopped_at_s
            if stopped_s is not None and now_s - stopped_s > STOP_GRACE_S:
                del self.resources[name]

    def _restore(self, data: Data, now_s: float) -> None:
        for name in data.registered_devices or {}:
            self.resources[name] = Resource(Endpoint(stopped_at_s=now_s))
        for entry in data.pod_device_entries or []:
            by_node = entry.device_ids if isinstance(entry.device_ids, dict) else {}
            self.held.append(
                Consumers(
                    entry.pod_uid,
                    entry.container_name,
                    entry.resource_name,
                    {node: list(devices or ()) for node, devices in by_node.items()},
                    entry.alloc_resp or b"",
                )
            )


def held_key(held: Consumers) -> tuple[str, str, str]:
    """Return what identifies an allocation: a container has at most one of a resource."""
    return held.pod_uid, held.container, held.resource


def _rpc_text(error: Exception) -> str:
    """Return an error of a call as Go's gRPC prints it: `rpc error: code = FailedPrecondition desc = ...`."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    code = "".join(word.capitalize() for word in error.code().name.split("_"))
    return f"rpc error: code = {code} desc = {error.details()}"
