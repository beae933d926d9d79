"""All resources of a node at the kubelet: a plugin for each, registered, and registered again whenever it must be.

It must be when the kubelet has a new socket (it was restarted, and has deleted ours), and when no stream has watched a
resource for a while: a kubelet that sees the old stream of a resource end drops its new endpoint with it.
"""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuvirt.clock import Clock, Signal, until_tick_s
from gpuvirt.errors import PathTooLongError
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kubelet import sockets
from gpuvirt.kubelet.deviceplugin import Answers, DevicePlugin, SocketTakenError
from gpuvirt.kubelet.registration import RegistrationFailedError, register
from gpuvirt.model.offers.view import NodeView, Registration, ResourceView
from gpuvirt.model.reasons import Reason, nodeproblems
from gpuvirt.node.agent import Agent
from gpuvirt.node.loops.intervals import Intervals
from gpuvirt.paths import KubeletPaths
from gpuvirt.tasks import backoff_s

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attempts:
    """When a resource was last registered, and when to try again."""

    kubelet: sockets.FileIdentity | None = None
    """The kubelet's socket at which it was registered."""
    not_before_s: float = 0.0
    failed_at: sockets.FileIdentity | None = None
    """The kubelet's socket at the last failure; a new one is worth a try at once."""
    tending: bool = False
    """An attempt is under way."""
    withheld: bool = False
    """It is not to be registered."""
    pauses: Iterator[float] = field(default_factory=backoff_s)


class Plugins:
    """The plugins of all resources."""

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
        """Serve what the node's view shows, for ever; at the end the sockets are gone."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._tend_all(group))
                async for view in self._agent.views.follow():
                    self._show(view)
        finally:
            await asyncio.gather(*(plugin.stop() for plugin in self._plugins.values()))

    def resend(self) -> None:
        """Send all lists once more, after which the kubelet writes its checkpoint."""
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
        """Take whether a resource is to be registered; one that may be again is, at once."""
        attempts = self._attempts[plugin.resource]
        if resource.silent:
            plugin.fall_silent()
        elif plugin.is_silent:
            attempts.kubelet = None  # the kubelet has asked another plugin meanwhile
        if attempts.withheld and not resource.withheld:
            self._due.set()
        attempts.withheld = resource.withheld

    def _add(self, view: ResourceView) -> None:
        try:
            path = sockets.socket_path(self._paths.device_plugins, view.name)
        except PathTooLongError as error:
            self._say(view.name, nodeproblems.not_registered(view.name, str(error)))
            return
        answers = Answers(self._agent.allocator.prefer, self._agent.allocator.allocate)
        self._plugins[view.name] = DevicePlugin(
            view, path, answers, self._clock, unknown_numa_is_node_0=self._unknown_numa_is_node_0
        )
        self._attempts[view.name] = _Attempts()
        self._due.set()

    async def _tend_all(self, group: asyncio.TaskGroup) -> None:
        """Tend each resource in a task of its own: a call to the kubelet that hangs holds up no other."""
        while True:
            kubelet = sockets.identity(self._paths.registration_socket)
            for plugin in self._plugins.values():
                if self._needs_tending(plugin, kubelet):
                    self._attempts[plugin.resource].tending = True
                    group.create_task(self._tend(plugin, kubelet))
            now_s = self._clock.monotonic_s()
            pauses = [tries.not_before_s - now_s for tries in self._attempts.values() if tries.not_before_s > now_s]
            await self._due.wait_for(self._clock, min([until_tick_s(now_s, self._intervals.kubelet_s), *pauses]))

    def _needs_tending(self, plugin: DevicePlugin, kubelet: sockets.FileIdentity | None) -> bool:
        attempts = self._attempts[plugin.resource]
        too_soon = attempts.not_before_s > self._clock.monotonic_s() and kubelet == attempts.failed_at
        if too_soon or attempts.tending or attempts.withheld:
            return False
        return not plugin.serves or kubelet is None or kubelet != attempts.kubelet or self._is_unwatched(plugin)

    async def _tend(self, plugin: DevicePlugin, kubelet: sockets.FileIdentity | None) -> None:
        """See to it that a resource has a socket, and that the kubelet knows and watches it."""
        attempts = self._attempts[plugin.resource]
        try:
            if not plugin.serves:
                await plugin.start()
                attempts.kubelet = None
            if kubelet is None:
                away = nodeproblems.kubelet_away(plugin.resource, self._paths.registration_socket)
                self._say(plugin.resource, away)
            else:
                await self._register(plugin, attempts, kubelet)
        except SocketTakenError as error:
            self._fail(plugin, kubelet, nodeproblems.socket_taken(plugin.resource, str(error)))
        except (RegistrationFailedError, OSError) as error:
            self._fail(plugin, kubelet, nodeproblems.not_registered(plugin.resource, str(error)))
        finally:
            attempts.tending = False

    async def _register(self, plugin: DevicePlugin, attempts: _Attempts, kubelet: sockets.FileIdentity) -> None:
        if attempts.withheld:
            return
        await register(self._paths, plugin.resource, plugin.path.name)
        attempts.kubelet = kubelet
        attempts.pauses = backoff_s()
        if not attempts.withheld:
            plugin.speak()
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
        self._say(plugin.resource, reason)

    def _say(self, resource: ResourceName, reason: Reason) -> None:
        self._agent.observe_registration(resource, Registration(registered=False, because=reason))
