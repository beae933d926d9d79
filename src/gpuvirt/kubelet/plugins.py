"""Runs one device plugin for each resource of a node's view."""

import asyncio
import logging

from gpuvirt.clock import Clock
from gpuvirt.errors import PathTooLongError
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kubelet import sockets
from gpuvirt.kubelet.deviceplugin import Answers, DevicePlugin
from gpuvirt.kubelet.registrar import Registrar
from gpuvirt.model.offers.view import NodeView, Registration, ResourceView
from gpuvirt.model.reasons import ReasonCode, nodeproblems
from gpuvirt.node.agent import Agent
from gpuvirt.node.loops.intervals import Intervals
from gpuvirt.paths import KubeletPaths

log = logging.getLogger(__name__)


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
        """Send the device lists of all resources again, so that the kubelet writes its checkpoint."""
        for plugin in self._plugins.values():
            plugin.resend()

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
        answers = Answers(self._agent.prefer, self._agent.allocate, self._agent.pre_start)
        plugin = DevicePlugin(view, path, answers, self._clock, unknown_numa_is_node_0=self._unknown_numa_is_node_0)
        self._plugins[view.name] = plugin
        self._registrar.add(plugin)

    def _observe(self, resource: ResourceName, registration: Registration) -> None:
        """Take the outcome of an attempt; while the kubelet is away, there is none."""
        because = registration.because
        if because is None or because.code is not ReasonCode.KUBELET_AWAY:
            self._agent.telemetry.registrations[resource, "failed" if because is not None else "ok"] += 1
        self._agent.reports.registration(resource, registration)
