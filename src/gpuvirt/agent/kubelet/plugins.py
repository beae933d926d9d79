"""The device plugins of a node, one for each resource of its view whose devices are GPUs or vGPUs."""

import asyncio
import logging
from pathlib import Path

from typing_extensions import override

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.known.requests import ContainerAllocator
from gpuvirt.agent.kubelet import sockets, wire
from gpuvirt.agent.kubelet.pluginserver import PluginServer
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.agent.kubelet.registrar import Registrar
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.clock import Clock
from gpuvirt.errors import PathTooLongError
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.offers.view import NodeView, Registration, ResourceView
from gpuvirt.model.reasons import ReasonCode, nodeproblems
from gpuvirt.paths import KubeletPaths

log = logging.getLogger(__name__)

EMPTY = ResourceName("gpuvirt.io/kubelet-record")
"""The resource without devices whose lists make the kubelet write its record."""


class DevicePlugin(PluginServer):
    """Serves one resource."""

    def __init__(
        self,
        view: ResourceView,
        path: Path,
        allocator: ContainerAllocator,
        clock: Clock,
        *,
        unknown_numa_is_node_0: bool,
    ) -> None:
        super().__init__(view.name, path, clock, allocator)
        self._view = view
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
        allocators, numa_node_0 = self._agent.allocators, self._unknown_numa_is_node_0
        plugin = DevicePlugin(view, path, allocators, self._clock, unknown_numa_is_node_0=numa_node_0)
        self._plugins[view.name] = plugin
        self._registrar.add(plugin)

    def _observe(self, resource: ResourceName, registration: Registration) -> None:
        """Record the outcome of an attempt; while the kubelet is away, there is none."""
        because = registration.because
        if because is None or because.code is not ReasonCode.KUBELET_AWAY:
            self._agent.telemetry.registrations[resource, "failed" if because is not None else "ok"] += 1
        self._agent.reports.registration(resource, registration)
