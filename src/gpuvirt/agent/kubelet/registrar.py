"""Serves device plugins and registers them with the kubelet, again where necessary.

A plugin registers again when the kubelet has a new socket (it has restarted, and has deleted the plugins' sockets), and
when the resource has had no ListAndWatch stream for a while: when the old stream of a resource ends, the kubelet drops
the new endpoint too.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator

import grpc
import grpc.aio
import msgspec

from gpuvirt.agent.kubelet import sockets, wire
from gpuvirt.agent.kubelet.pluginserver import PluginServer, SocketTakenError
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.clock import Clock, Signal, until_tick_s
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.offers.view import Registration
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, nodeproblems
from gpuvirt.paths import KubeletPaths
from gpuvirt.tasks import backoff_s

log = logging.getLogger(__name__)

Observe = Callable[[ResourceName, Registration], None]
"""Takes the state of a resource's registration with the kubelet."""


class _Attempts(msgspec.Struct):
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
    pauses: Iterator[float] = msgspec.field(default_factory=backoff_s)


class Registrar:
    """Keeps plugins served and registered."""

    def __init__(self, paths: KubeletPaths, clock: Clock, intervals: Intervals, observe: Observe) -> None:
        self._paths = paths
        self._clock = clock
        self._intervals = intervals
        self._observe = observe
        self._plugins: dict[ResourceName, PluginServer] = {}
        self._attempts: dict[ResourceName, _Attempts] = {}
        self._due = Signal()

    def add(self, plugin: PluginServer) -> None:
        """Serve and register a plugin from now on."""
        self._plugins[plugin.resource] = plugin
        self._attempts[plugin.resource] = _Attempts()
        plugin.announce_ends(self._due)
        self._due.set()

    def withhold(self, resource: ResourceName, *, withheld: bool, silent: bool) -> None:
        """Record whether a resource must not be registered, and whether its plugin sends no lists.

        A resource that is no longer withheld is registered at once.
        """
        plugin, attempts = self._plugins[resource], self._attempts[resource]
        if silent:
            plugin.stop_sending()
        elif plugin.is_silent:
            attempts.kubelet = None  # the kubelet has used another plugin meanwhile
        if attempts.withheld and not withheld:
            self._due.set()
        attempts.withheld = withheld

    async def stop(self) -> None:
        """Close all plugins' sockets."""
        await asyncio.gather(*(plugin.stop() for plugin in self._plugins.values()))

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Register each resource in its own task, so that a call that hangs does not delay other resources."""
        while True:
            kubelet = sockets.identity(self._paths.registration_socket)
            for plugin in self._plugins.values():
                if self._is_due(plugin, kubelet):
                    self._attempts[plugin.resource].is_running = True
                    group.create_task(self._serve_and_register(plugin, kubelet))
            await self._due.wait_for(self._clock, self._pause_s())

    def _pause_s(self) -> float:
        """Return the time to the next check.

        A kubelet that has just ended may be back at any moment, and that of a host that boots starts after the agent.
        It admits the pods of the node again at once, and rejects for good a running pod whose init container has ended
        while the plugin has not registered.
        """
        now_s, intervals = self._clock.monotonic_s(), self._intervals
        pauses = [tries.not_before_s - now_s for tries in self._attempts.values() if tries.not_before_s > now_s]
        awaits_kubelet = any(
            not plugin.streams and now_s < plugin.streamless_since_s + intervals.kubelet_return_most_s
            for plugin in self._plugins.values()
        )
        every_s = intervals.kubelet_return_s if awaits_kubelet else intervals.kubelet_s
        return min([until_tick_s(now_s, every_s), *pauses])

    def _is_due(self, plugin: PluginServer, kubelet: sockets.FileIdentity | None) -> bool:
        """Return whether a resource needs a socket or a registration now."""
        attempts = self._attempts[plugin.resource]
        too_soon = attempts.not_before_s > self._clock.monotonic_s() and kubelet == attempts.failed_at
        if too_soon or attempts.is_running or attempts.withheld:
            return False
        return not plugin.serves or kubelet is None or kubelet != attempts.kubelet or self._is_unwatched(plugin)

    async def _serve_and_register(self, plugin: PluginServer, kubelet: sockets.FileIdentity | None) -> None:
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
            self._fail(
                plugin,
                kubelet,
                Reason(
                    ReasonCode.SOCKET_TAKEN,
                    plugin.resource,
                    "can't be registered: another program listens at its socket",
                    (Seen("", str(error)),),
                    "stop the other device plugin (NVIDIA's kubevirt-gpu-device-plugin or sandbox-device-plugin)",
                ),
            )
        except (RegistrationFailedError, OSError) as error:
            socket = self._paths.registration_socket
            is_away = not sockets.is_listened_at(socket)  # a kubelet that was killed leaves its socket
            away = nodeproblems.kubelet_away(plugin.resource, socket, is_left=True)
            self._fail(plugin, kubelet, away if is_away else nodeproblems.not_registered(plugin.resource, str(error)))
        finally:
            attempts.is_running = False

    async def _register(self, plugin: PluginServer, attempts: _Attempts, kubelet: sockets.FileIdentity) -> None:
        if attempts.withheld:
            return
        await register(self._paths, plugin.resource, plugin.path.name, plugin.options)
        attempts.kubelet = kubelet
        attempts.pauses = backoff_s()
        if not attempts.withheld:
            plugin.resume_sending()
        plugin.await_stream()
        self._observe(plugin.resource, Registration(registered=True))
        log.info("registered", extra={"resource": plugin.resource, "socket": str(plugin.path)})

    def _is_unwatched(self, plugin: PluginServer) -> bool:
        if plugin.streams:
            return False
        return self._clock.monotonic_s() - plugin.streamless_since_s >= self._intervals.streamless_s

    def _fail(self, plugin: PluginServer, kubelet: sockets.FileIdentity | None, reason: Reason) -> None:
        attempts = self._attempts[plugin.resource]
        attempts.kubelet, attempts.failed_at = None, kubelet
        attempts.not_before_s = self._clock.monotonic_s() + next(attempts.pauses)
        self._report(plugin.resource, reason)

    def _report(self, resource: ResourceName, reason: Reason) -> None:
        self._observe(resource, Registration(registered=False, because=reason))


METHOD = "/v1beta1.Registration/Register"

TIMEOUT_S = 12.0
"""The kubelet connects to the plugin before it answers, with a timeout of 10 s."""


class RegistrationFailedError(GpuvirtError):
    """The kubelet cannot be reached, or rejects a resource."""


async def register(
    paths: KubeletPaths, resource: ResourceName, endpoint: str, options: pb.DevicePluginOptions | None = None
) -> None:
    """Register `resource`, whose plugin listens on the socket `endpoint`; raise RegistrationFailedError.

    `options` default to those of device plugins.
    """
    request = wire.registration(resource, endpoint, options)
    async with grpc.aio.insecure_channel(f"unix:{paths.registration_socket}") as channel:
        call = channel.unary_unary(METHOD, pb.RegisterRequest.SerializeToString, pb.Empty.FromString)
        try:
            await call(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise RegistrationFailedError(
                f"{paths.registration_socket}: the kubelet did not register {resource}:"
                f" {error.code().name}: {error.details()}"
            ) from error
