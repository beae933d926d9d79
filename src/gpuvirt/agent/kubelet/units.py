"""Offers the units of a node's shared GPUs to the kubelet, from the first time that GPUs are shared.

The device plugin has as many devices as there are units, and the kubelet calls its PreStartContainer before each start.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import grpc
from typing_extensions import override

from gpuvirt.agent.known.requests import ContainerAllocator
from gpuvirt.agent.kubelet import checkpoint, sockets, wire
from gpuvirt.agent.kubelet.checkpoint import PodDevices, allocations_unknown
from gpuvirt.agent.kubelet.pluginserver import PluginCall, PluginServer
from gpuvirt.agent.kubelet.podresources import PodResources, PodResourcesUnknownError
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.agent.kubelet.registrar import Observe, Registrar
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.shares.shareallocator import Dependencies, ShareAllocator, UnitAllocation
from gpuvirt.clock import Clock, Signal
from gpuvirt.errors import DamagedError, PathTooLongError
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.offers.view import Registration
from gpuvirt.model.reasons import nodeproblems
from gpuvirt.model.shares.demand import ContainerName
from gpuvirt.model.shares.node.records import is_unit_id, unit_ids
from gpuvirt.model.shares.node.sharespec import nonce_of
from gpuvirt.paths import KubeletPaths


class RecordedUnits:
    """The units in one kubelet's checkpoint, which the kubelet writes before it starts a container."""

    def __init__(self, paths: KubeletPaths, resource: ResourceName) -> None:
        self._path = paths.checkpoint
        self._resource = resource

    def read(self) -> Sequence[UnitAllocation] | Unknown:
        """Return the containers with units; a missing or damaged checkpoint makes them unknown."""
        try:
            entries = checkpoint.parse(self._path.read_bytes()).data.pod_device_entries or ()
            return [_allocation(entry) for entry in entries if entry.resource_name == self._resource]
        except OSError as error:
            return Unknown(allocations_unknown(f"{self._path}: {error.strerror}"))
        except DamagedError as error:
            return Unknown(allocations_unknown(f"{self._path}: {error}"))


def _allocation(entry: PodDevices) -> UnitAllocation:
    names = wire.cdi_devices(entry.alloc_resp or b"")
    ours = [name for name in names if nonce_of(name) is not None]
    return UnitAllocation(
        PodUid(entry.pod_uid),
        ContainerName(entry.container_name),
        frozenset(entry.ids()),
        ours[0] if len(ours) == 1 else None,
    )


log = logging.getLogger(__name__)


class SharePlugin(PluginServer):
    """Serves the units of one node."""

    def __init__(self, resource: ResourceName, path: Path, clock: Clock, allocator: ContainerAllocator) -> None:
        super().__init__(resource, path, clock, allocator)
        self._ids: tuple[DeviceId, ...] = ()

    def show(self, ids: tuple[DeviceId, ...]) -> None:
        """Send these units to the kubelet from now on."""
        if ids != self._ids:
            self._ids = ids
            self.resend()

    @property
    @override
    def options(self) -> pb.DevicePluginOptions:
        return wire.unit_options()

    @override
    def listed(self) -> pb.ListAndWatchResponse:
        return wire.unit_list(self._ids)

    @override
    def log_allocated(self, containers: Sequence[Sequence[DeviceId]]) -> None:
        log.info("allocated", extra={"resource": self.resource, "units": [len(ids) for ids in containers]})

    @override
    async def allocate(self, request: pb.AllocateRequest, call: PluginCall) -> pb.AllocateResponse:
        if unknown := _unknown(wire.asked_for(request)):
            message = f"{unknown!r} is not the id of a unit; expected u0, u1 ..."
            await self.refuse(call, grpc.StatusCode.NOT_FOUND, message)
        return await super().allocate(request, call)


def _unknown(containers: Sequence[Sequence[DeviceId]]) -> DeviceId | None:
    """Return an id that is not one of a unit: another plugin may have listed it before this one."""
    return next((device for ids in containers for device in ids if not is_unit_id(device)), None)


class UnitOffer:
    """The units of one resource."""

    def __init__(
        self,
        dependencies: Dependencies,
        kubelet: KubeletPaths,
        intervals: Intervals,
        observe: Observe,
    ) -> None:
        self.allocator = ShareAllocator(dependencies)
        self._on = dependencies
        self._shares = dependencies.shares
        self._kubelet = kubelet
        self._intervals = intervals
        self._observe = observe
        self._registrar = Registrar(kubelet, dependencies.clock, intervals, observe)
        self._plugin: SharePlugin | None = None
        self._ids: tuple[DeviceId, ...] = ()

    async def run(self) -> None:
        """Offer the units until cancelled; then remove the socket. Containers keep theirs."""
        changed = Signal()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._registrar.run(group))
                group.create_task(self.allocator.run())
                group.create_task(self.allocator.judge(self._intervals.specs_s))
                group.create_task(self._renew_record())
                with self._shares.state.notifying(changed), self._shares.store.records.notifying(changed):
                    while True:
                        self._show()
                        await changed.wait()
        finally:
            await self._registrar.stop()

    def resend(self) -> None:
        """Send the list of units again, so that the kubelet writes its checkpoint."""
        if self._plugin is not None:
            self._plugin.resend()

    async def _renew_record(self) -> None:
        """Have the kubelet write its checkpoint without pods that have ended, whenever it still has some.

        The kubelet frees the devices of ended pods when it is asked for its allocations (`UpdateAllocatedDevices` in
        podresources/server_v1.go, Kubernetes 1.36), and writes its checkpoint when it gets a list.
        """
        api = PodResources(self._kubelet.pod_resources_socket, self._on.clock)
        try:
            while True:
                await self._on.accounts.outdated.wait()
                self.resend()  # while it waits for Allocate it has freed them, and may answer the question late
                try:
                    await api.consumers()
                except PodResourcesUnknownError as error:
                    # unknown: the kubelet keeps the units
                    log.debug("the kubelet may not have freed the units of ended pods: %s", error)
                self.resend()
        finally:
            await api.close()

    def _show(self) -> None:
        """List the units. A node that has never shared a GPU, and has no containers with shares, registers nothing."""
        self._ids = self._listed()
        if self._plugin is None and self._ids:
            self._plugin = self._added()
        if self._plugin is not None:
            self._plugin.show(self._ids)

    def _added(self) -> SharePlugin | None:
        resource = self._shares.resource
        try:
            path = sockets.socket_path(self._kubelet.device_plugins, resource)
        except PathTooLongError as error:
            problem = nodeproblems.not_registered(resource, str(error))
            self._observe(resource, Registration(registered=False, because=problem))
            return None  # unknown: nothing, the resource is reported as not registered
        plugin = SharePlugin(resource, path, self._on.clock, self.allocator)
        plugin.show(self._ids)
        self._registrar.add(plugin)
        return plugin

    def _listed(self) -> tuple[DeviceId, ...]:
        """Return the ids to list: for the units of all GPUs, and for those that containers have of other GPUs.

        While the kubelet's record is unknown, no id that was listed is left out.
        """
        capacity, recorded = self._shares.state.get().node.capacity, self._on.accounts.recorded()
        count = sum(capacity.values()) + self.allocator.records.used_beside(capacity)
        if isinstance(recorded, Unknown):
            return max(unit_ids(count, ()), self._ids, key=len)
        return unit_ids(
            count, frozenset().union(*(allocation.ids for allocation in recorded if self._may_run(allocation.pod)))
        )

    def _may_run(self, pod: PodUid) -> bool:
        """Return whether a pod may still have units: the kubelet's record keeps ended pods until it is next written."""
        known = self._shares.pods.known
        return known is None or pod in self.allocator.records.pods or (pod in known and not known[pod].ended)
