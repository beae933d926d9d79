"""Runs one device plugin for each resource of a node, and registers it with the kubelet, again where necessary.

A plugin registers again when the kubelet has a new socket (it has restarted, and has deleted the plugins' sockets), and
when the resource has had no ListAndWatch stream for a while: when the old stream of a resource ends, the kubelet drops
the new endpoint too.
"""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import grpc.aio

from gpuvirt.clock import Clock, Signal, until_tick_s
from gpuvirt.errors import GpuvirtError, PathTooLongError
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kubelet import sockets, wire
from gpuvirt.kubelet.deviceplugin import Answers, DevicePlugin, SocketTakenError
from gpuvirt.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.model.offers.view import NodeView, Registration, ResourceView
from gpuvirt.model.reasons import Reason, nodeproblems
from gpuvirt.node.agent import Agent
from gpuvirt.node.loops.intervals import Intervals
from gpuvirt.paths import KubeletPaths
from gpuvirt.tasks import backoff_s

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attempts:
    """The attempts to register a resource."""

    kubelet: sockets.FileIdentity | None = None
    """The kubelet's socket of the last successful registration."""
    not_before_s: float = 0.0
    failed_at: sockets.FileIdentity | None = None
    """The kubelet's socket at the last failure; with a new socket, the plugin tries again at once."""
    is_running: bool = False
    """Whether an attempt is in progress."""
    withheld: bool = False
    """Whether the resource must not be registered."""
    pauses: Iterator[float] = field(default_factory=backoff_s)


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
        self._intervals = intervals
        self._unknown_numa_is_node_0 = unknown_numa_is_node_0
        self._plugins: dict[ResourceName, DevicePlugin] = {}
        self._attempts: dict[ResourceName, _Attempts] = {}
        self._due = Signal()

    async def run(self) -> None:
        """Serve the resources of the node's view until cancelled; then remove the sockets."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._register_all(group))
                async for view in self._agent.views.follow():
                    self._show(view)
        finally:
            await asyncio.gather(*(plugin.stop() for plugin in self._plugins.values()))

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
            self._withhold(plugin, resource)
            plugin.show(resource)

    def _withhold(self, plugin: DevicePlugin, resource: ResourceView) -> None:
        """Apply whether a resource is withheld; register it at once when it no longer is."""
        attempts = self._attempts[plugin.resource]
        if resource.silent:
            plugin.stop_sending()
        elif plugin.is_silent:
            attempts.kubelet = None  # the kubelet has used another plugin meanwhile
        if attempts.withheld and not resource.withheld:
            self._due.set()
        attempts.withheld = resource.withheld

    def _add(self, view: ResourceView) -> None:
        try:
            path = sockets.socket_path(self._paths.device_plugins, view.name)
        except PathTooLongError as error:
            self._report(view.name, nodeproblems.not_registered(view.name, str(error)))
            return
        answers = Answers(self._agent.allocator.prefer, self._agent.allocator.allocate)
        self._plugins[view.name] = DevicePlugin(
            view, path, answers, self._clock, unknown_numa_is_node_0=self._unknown_numa_is_node_0
        )
        self._attempts[view.name] = _Attempts()
        self._due.set()

    async def _register_all(self, group: asyncio.TaskGroup) -> None:
        """Register each resource in its own task, so that a call that hangs does not delay other resources."""
        while True:
            kubelet = sockets.identity(self._paths.registration_socket)
            for plugin in self._plugins.values():
                if self._is_due(plugin, kubelet):
                    self._attempts[plugin.resource].is_running = True
                    group.create_task(self._serve_and_register(plugin, kubelet))
            now_s = self._clock.monotonic_s()
            pauses = [tries.not_before_s - now_s for tries in self._attempts.values() if tries.not_before_s > now_s]
            await self._due.wait_for(self._clock, min([until_tick_s(now_s, self._intervals.kubelet_s), *pauses]))

    def _is_due(self, plugin: DevicePlugin, kubelet: sockets.FileIdentity | None) -> bool:
        """Return whether a resource needs a socket or a registration now."""
        attempts = self._attempts[plugin.resource]
        too_soon = attempts.not_before_s > self._clock.monotonic_s() and kubelet == attempts.failed_at
        if too_soon or attempts.is_running or attempts.withheld:
            return False
        return not plugin.serves or kubelet is None or kubelet != attempts.kubelet or self._is_unwatched(plugin)

    async def _serve_and_register(self, plugin: DevicePlugin, kubelet: sockets.FileIdentity | None) -> None:
        """Start the plugin where it does not serve, and register its resource with the kubelet."""
        attempts = self._attempts[plugin.resource]
        try:
            if not plugin.serves:
                await plugin.start()
                attempts.kubelet = None
            if kubelet is None:
                away = nodeproblems.kubelet_away(plugin.resource, self._paths.registration_socket)
                self._report(plugin.resource, away)
            else:
                await self._register(plugin, attempts, kubelet)
        except SocketTakenError as error:
            self._fail(plugin, kubelet, nodeproblems.socket_taken(plugin.resource, str(error)))
        except (RegistrationFailedError, OSError) as error:
            self._fail(plugin, kubelet, nodeproblems.not_registered(plugin.resource, str(error)))
        finally:
            attempts.is_running = False

    async def _register(self, plugin: DevicePlugin, attempts: _Attempts, kubelet: sockets.FileIdentity) -> None:
        if attempts.withheld:
            return
        await register(self._paths, plugin.resource, plugin.path.name)
        attempts.kubelet = kubelet
        attempts.pauses = backoff_s()
        if not attempts.withheld:
            plugin.resume_sending()
        plugin.streamless_since_s = self._clock.monotonic_s()
        self._agent.telemetry.registrations[plugin.resource, "ok"] += 1
        self._agent.observe_registration(plugin.resource, Registration(registered=True))
        log.info("registered", extra={"resource": plugin.resource, "socket": str(plugin.path)})

    def _is_unwatched(self, plugin: DevicePlugin) -> bool:
        if plugin.streams:
            return False
        return self._clock.monotonic_s() - plugin.streamless_since_s >= self._intervals.streamless_s

    def _fail(self, plugin: DevicePlugin, kubelet: sockets.FileIdentity | None, reason: Reason) -> None:
        attempts = self._attempts[plugin.resource]
        attempts.kubelet, attempts.failed_at = None, kubelet
        attempts.not_before_s = self._clock.monotonic_s() + next(attempts.pauses)
        self._agent.telemetry.registrations[plugin.resource, "failed"] += 1
        self._report(plugin.resource, reason)

    def _report(self, resource: ResourceName, reason: Reason) -> None:
        self._agent.observe_registration(resource, Registration(registered=False, because=reason))


METHOD = "/v1beta1.Registration/Register"

TIMEOUT_S = 12.0
"""The kubelet connects to the plugin before it answers, with a timeout of 10 s."""


class RegistrationFailedError(GpuvirtError):
    """The kubelet cannot be reached, or rejects a resource."""


async def register(paths: KubeletPaths, resource: ResourceName, endpoint: str) -> None:
    """Register `resource`, whose plugin listens on the socket `endpoint`; raise RegistrationFailedError."""
    request = wire.registration(resource, endpoint)
    async with grpc.aio.insecure_channel(f"unix:{paths.registration_socket}") as channel:
        call = channel.unary_unary(METHOD, pb.RegisterRequest.SerializeToString, pb.Empty.FromString)
        try:
            await call(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise RegistrationFailedError(
                f"{paths.registration_socket}: the kubelet did not register {resource}:"
                f" {error.code().name}: {error.details()}"
            ) from error
