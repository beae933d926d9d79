"""The device plugins of a node, one for each resource of its view whose devices are GPUs or vGPUs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import msgspec
from typing_extensions import override

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.allocation.allocator import AllocationRefusedError, AllocationRequest
from gpuvirt.agent.kubelet import sockets, wire
from gpuvirt.agent.kubelet.pluginserver import PluginCall, PluginServer
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.agent.kubelet.registrar import Registrar
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.clock import Clock
from gpuvirt.errors import PathTooLongError
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.allocation.placement import PlacementError
from gpuvirt.model.offers.view import NodeView, Registration, ResourceView
from gpuvirt.model.reasons import ReasonCode, nodeproblems
from gpuvirt.paths import KubeletPaths

log = logging.getLogger(__name__)

EMPTY = ResourceName("gpuvirt.io/kubelet-record")
"""The resource without devices whose lists make the kubelet write its record."""


class Answers(msgspec.Struct, frozen=True):
    """The functions that choose and allocate devices."""

    prefer: Callable[[ResourceName, Sequence[DeviceId], Sequence[DeviceId], int], Sequence[DeviceId]]
    """Returns the preferred devices, from the resource, the available and the required devices, and their number."""
    allocate: Callable[[AllocationRequest], Awaitable[tuple[Attachment, ...]]]
    """Allocates devices to containers."""
    pre_start: Callable[[ResourceName, Sequence[DeviceId]], Awaitable[None]]
    """Is called before each start of a container."""


class DevicePlugin(PluginServer):
    """Serves one resource."""

    def __init__(
        self, view: ResourceView, path: Path, answers: Answers, clock: Clock, *, unknown_numa_is_node_0: bool
    ) -> None:
        super().__init__(view.name, path, clock)
        self._view = view
        self._answers = answers
        self._unknown_numa_is_node_0 = unknown_numa_is_node_0

    def show(self, view: ResourceView) -> None:
        """Send these devices to the kubelet from now on."""
        before, self._view = self.listed(), view
        if self.listed() != before:
            self.resend()

    @property
    @override
    def options(self) -> pb.DevicePluginOptions:
        return wire.options()

    @override
    def listed(self) -> pb.ListAndWatchResponse:
        return wire.device_list(self._view, unknown_numa_is_node_0=self._unknown_numa_is_node_0)

    @override
    async def prefer(self, request: pb.PreferredAllocationRequest, call: PluginCall) -> pb.PreferredAllocationResponse:
        try:
            return wire.chosen(
                self._answers.prefer(self.resource, available, must_include, size)
                for available, must_include, size in wire.choices(request)
            )
        except PlacementError as error:
            await self.refuse(call, grpc.StatusCode.INVALID_ARGUMENT, str(error))

    @override
    async def allocate(self, request: pb.AllocateRequest, call: PluginCall) -> pb.AllocateResponse:
        containers = wire.asked_for(request)
        try:
            attachments = await self._answers.allocate(AllocationRequest(self.resource, containers))
        except AllocationRefusedError as error:
            unknown = error.reason.code in {ReasonCode.UNKNOWN_DEVICE, ReasonCode.UNKNOWN_RESOURCE}
            status = grpc.StatusCode.NOT_FOUND if unknown else grpc.StatusCode.FAILED_PRECONDITION
            await self.refuse(call, status, error.reason.text, reason=error.reason.code)
        # Logging takes as long as reading a device again, and need not delay the answer to the kubelet.
        asyncio.get_running_loop().call_soon(self._log_allocated, containers)
        return wire.allocate_response(attachments)

    def _log_allocated(self, containers: Sequence[Sequence[DeviceId]]) -> None:
        log.info("allocated", extra={"resource": self.resource, "devices": containers})

    @override
    async def pre_start(self, request: pb.PreStartContainerRequest, call: PluginCall) -> pb.PreStartContainerResponse:
        try:
            await self._answers.pre_start(self.resource, wire.starting_devices(request))
        except AllocationRefusedError as error:
            await self.refuse_start(call, error.reason)
        return pb.PreStartContainerResponse()


class Plugins:
    """The device plugins of all resources."""

    def __init__(
        self,
        agent: Agent,
        paths: KubeletPaths,
        clock: Clock,
        intervals: Intervals,
        *,
        unknown_numa_is_node_0: bool = False,
    ) -> None:
        self._agent = agent
        self._paths = paths
        self._clock = clock
        self._unknown_numa_is_node_0 = unknown_numa_is_node_0
        self._plugins: dict[ResourceName, DevicePlugin] = {}
        self._registrar = Registrar(paths, clock, intervals, self._observe)

    async def run(self) -> None:
        """Serve the resources of the node's view until cancelled; then remove the sockets."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._registrar.run(group))
                async for view in self._agent.views.follow():
                    self._show(view)
        finally:
            await self._registrar.stop()

    def resend(self) -> None:
        """Send the device lists of all resources again, so that the kubelet writes its checkpoint.

        An agent that has offered nothing registers a resource without devices for that.
        """
        for plugin in self._plugins.values():
            plugin.resend()
        if not self._plugins and self._agent.host_observed:
            self._add(ResourceView(EMPTY, ()))

    def _show(self, view: NodeView) -> None:
        for resource in view.resources:
            plugin = self._plugins.get(resource.name)
            if plugin is None:
                if resource.devices and not resource.withheld:
                    self._add(resource)
                continue
            self._registrar.withhold(resource.name, withheld=resource.withheld, silent=resource.silent)
            plugin.show(resource)

    def _add(self, view: ResourceView) -> None:
        try:
            path = sockets.socket_path(self._paths.device_plugins, view.name)
        except PathTooLongError as error:
            problem = nodeproblems.not_registered(view.name, str(error))
            self._agent.reports.registration(view.name, Registration(registered=False, because=problem))
            return
        allocators = self._agent.allocators
        answers = Answers(allocators.prefer, allocators.allocate, allocators.pre_start)
        plugin = DevicePlugin(view, path, answers, self._clock, unknown_numa_is_node_0=self._unknown_numa_is_node_0)
        self._plugins[view.name] = plugin
        self._registrar.add(plugin)

    def _observe(self, resource: ResourceName, registration: Registration) -> None:
        """Record the outcome of an attempt; while the kubelet is away, there is none."""
        because = registration.because
        if because is None or because.code is not ReasonCode.KUBELET_AWAY:
            self._agent.telemetry.registrations[resource, "failed" if because is not None else "ok"] += 1
        self._agent.reports.registration(resource, registration)
