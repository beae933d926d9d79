"""A simulated kubelet: registration, device lists, pods, the checkpoint and pod-resources, on real sockets.

It has one peculiarity of the real kubelet that plugins must cope with: when any stream of a resource ends, the kubelet
drops the resource's current plugin, even where that plugin registered after the one whose stream ended.
"""

import asyncio
import contextlib
import itertools
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import msgspec

from gpuvirt.agent.kubelet import wire
from gpuvirt.agent.kubelet.pluginserver import PluginCall
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.agent.kubelet.proto import podresources_pb2 as pods_pb
from gpuvirt.agent.store.files import replace_file
from gpuvirt.clock import Clock
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import parse_resource_name
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.kubelet import claims
from gpuvirt_sim.kubelet.client import PluginClient
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.manager import AdmissionError, Consumers, DeviceManager
from gpuvirt_sim.kubelet.servers import Servers, pod_resources, registration

NAMESPACE = "default"


class Pod(msgspec.Struct):
    """A pod on this node."""

    name: str
    uid: str
    containers: Sequence[Container]
    held: list[Consumers] = msgspec.field(default_factory=list)
    plugins_s: float = 0.0
    """How long the kubelet has waited for the answers of device plugins to admit the pod."""

    def answer(self, container: str = "compute") -> pb.ContainerAllocateResponse:
        """Return the answers of all plugins for a container, merged."""
        merged = pb.ContainerAllocateResponse()
        for held in self.held:
            if held.container == container:
                merged.MergeFromString(held.answer)
        return merged

    def env(self, container: str = "compute") -> Mapping[str, str]:
        """Return the environment variables that plugins set in a container."""
        return dict(self.answer(container).envs)

    def device_nodes(self, container: str = "compute") -> Sequence[str]:
        """Return the device nodes that plugins gave a container."""
        return [device.host_path for device in self.answer(container).devices]


class SimKubelet:
    """The kubelet of one node."""

    def __init__(self, root: Path, clock: Clock, group: asyncio.TaskGroup) -> None:
        """Use `running` instead, which also stops the kubelet."""
        self.paths = KubeletPaths(root)
        self.pods: dict[str, Pod] = {}
        self.manager = DeviceManager()
        self.registrations: list[str] = []
        """The resources of all Register calls, in order."""
        self.has_pods = True
        """Whether the kubelet has its pods from the API server; until then it lists no pod, and frees no device."""
        self.allocatable_fails: grpc.StatusCode | None = None
        """The error with which GetAllocatableResources fails; None if it answers."""
        self.listed = 0
        """How many calls of List were answered with pods."""
        self.rejects_lists = 0
        """So many of the next calls of List are rejected, as beside a client that calls all the time."""
        self.overtakes_writes = False
        """Whether an earlier write of the checkpoint ends last: `writeCheckpoint` copies the allocations under a lock,
        and writes the copy without one."""
        self._clock = clock
        self._group = group
        self._clients: dict[str, PluginClient] = {}
        self._servers = Servers()
        self._streams: dict[asyncio.Task[None], tuple[str, PluginClient]] = {}
        self._uids = itertools.count(1)

    async def start(self) -> None:
        """Start, or start again: read the checkpoint, delete the sockets of plugins, listen."""
        folder = self.paths.device_plugins
        folder.mkdir(parents=True, exist_ok=True)
        for other in (self.paths.pod_resources_socket.parent, self.paths.pods, self.paths.plugins_registry):
            other.mkdir(parents=True, exist_ok=True)
        if not self.paths.claims.exists():
            self._write_claims()
        stored = self.paths.checkpoint.read_bytes() if self.paths.checkpoint.exists() else None
        self.manager = DeviceManager(stored, self._clock.monotonic_s())
        for entry in folder.iterdir():
            if stat.S_ISSOCK(entry.stat().st_mode):
                entry.unlink()
        self.paths.pod_resources_socket.unlink(missing_ok=True)
        await self._servers.serve(self.paths.registration_socket, registration(self._register))
        await self._servers.serve(
            self.paths.pod_resources_socket, pod_resources(self._list_pods, self._get_pod, self._get_allocatable)
        )

    async def stop(self) -> None:
        """Stop: the connections to plugins end, pods continue to run."""
        await self._servers.stop()
        for task in list(self._streams):
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def restart(self, *, api_server: bool = True) -> None:
        """Stop and start; without an API server the kubelet has no pods."""
        await self.stop()
        self.has_pods = api_server
        await self.start()

    async def end_oldest_stream(self, resource: str) -> None:
        """End the connection to a plugin: the oldest one, where the plugin has registered more than once."""
        task, (_, client) = next(item for item in self._streams.items() if item[1][0] == resource)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
        await self._drop(resource)

    async def lose_plugins(self) -> None:
        """Lose all plugins at once, as when their process is killed: no answer that is under way comes any more."""
        for resource in list(self._clients):
            await self._drop(resource)

    async def run_pod(self, name: str, *containers: Container) -> Pod:
        """Admit a pod; raise AdmissionError with the text that its status would show."""
        pod = self.pods[name] = Pod(name, f"00000000-0000-4000-9000-{next(self._uids):012d}", containers)
        self.manager.free_all_but(self._uids_of_pods())
        try:
            for container in sorted(containers, key=lambda container: not container.init):
                for resource, count in container.limits.items():
                    if not self.manager.has_resource(resource):
                        continue
                    pod.held.append(await self._allocate(pod, container, resource, count))
                    if container.init:
                        self.manager.keep_for_reuse(pod.held[-1])
                self._write_checkpoint()  # before the next container's Allocate
        except AdmissionError:  # the devices are freed at the next admission, or the next call of List
            del self.pods[name]
            raise
        (self.paths.pods / pod.uid).mkdir(exist_ok=True)
        if any(container.claims for container in containers):
            self._write_claims()
        return pod

    def end_pod(self, name: str) -> None:
        """End a pod. Its devices are free at once, but stay in the checkpoint until it is next written."""
        folder = self.paths.pods / self.pods.pop(name).uid
        if folder.exists():
            folder.rmdir()
        self.manager.free_all_but(self._uids_of_pods())
        self._write_claims()

    def capacity(self) -> Mapping[str, int]:
        """Return the node's capacity."""
        return self.manager.capacity(self._clock.monotonic_s())

    def allocatable(self) -> Mapping[str, int]:
        """Return how many devices of each resource pods can get."""
        return self.manager.allocatable(self._clock.monotonic_s())

    async def _allocate(self, pod: Pod, container: Container, resource: str, count: int) -> Consumers:
        async def allocate(devices: Sequence[str]) -> bytes:
            answer = await self.client(resource).allocate([devices])
            return answer.container_responses[0].SerializeToString()

        async def prefer(available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
            client = self.client(resource)
            available_call = client.supported.get_preferred_allocation_available
            return await client.prefer(available, must_include, size) if available_call else ()

        began_s = self._clock.monotonic_s()
        held = await self.manager.give(pod.uid, container.name, resource, count, prefer, allocate)
        pod.plugins_s += self._clock.monotonic_s() - began_s
        return held

    def client(self, resource: str) -> PluginClient:
        """Return the connection to the plugin of a resource; raise AdmissionError without one."""
        client = self._clients.get(resource)
        if client is None:
            raise AdmissionError(f"endpoint not found in cache for a registered resource: {resource}")
        return client

    async def _register(self, request: pb.RegisterRequest, call: PluginCall) -> pb.Empty:
        self.registrations.append(request.resource_name)
        if request.version != wire.VERSION:
            await call.abort(grpc.StatusCode.UNKNOWN, f"requested API version {request.version!r} is not supported")
        try:
            parse_resource_name(request.resource_name)
        except InvalidIdError as error:
            await call.abort(grpc.StatusCode.UNKNOWN, f"the ResourceName is invalid: {error}")
        client = PluginClient(self.paths.device_plugins / request.endpoint)
        self._clients[request.resource_name] = client
        client.supported = await client.options()
        self.manager.connected(request.resource_name)
        task = self._group.create_task(self._follow(request.resource_name, client))
        self._streams[task] = request.resource_name, client
        task.add_done_callback(lambda ended: self._streams.pop(ended, None))
        return pb.Empty()

    async def _follow(self, resource: str, client: PluginClient) -> None:
        # UsageError: the end of an older plugin's stream has closed the connection before this one began.
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            async for answer in client.lists():
                nodes = {device.ID: _numa_node(device) for device in answer.devices}
                healthy = {device.ID for device in answer.devices if device.health == wire.HEALTHY}
                self.manager.updated(
                    resource,
                    {device: node for device, node in nodes.items() if device in healthy},
                    {device: node for device, node in nodes.items() if device not in healthy},
                )
                self._write_checkpoint()
        await self._drop(resource)

    async def _drop(self, resource: str) -> None:
        """Disconnect the resource's current plugin, also where it is not the plugin whose stream has ended."""
        present = self._clients.pop(resource, None)
        if present is not None:
            await present.close()
            self.manager.disconnected(resource, self._clock.monotonic_s())

    async def _list_pods(
        self, _request: pods_pb.ListPodResourcesRequest, call: PluginCall
    ) -> pods_pb.ListPodResourcesResponse:
        if self.rejects_lists:
            self.rejects_lists -= 1
            await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        if not self.has_pods:
            return pods_pb.ListPodResourcesResponse()
        self.manager.free_all_but(self._uids_of_pods())
        self.listed += 1
        return pods_pb.ListPodResourcesResponse(pod_resources=[_resources_of(pod) for pod in self.pods.values()])

    async def _get_pod(
        self, request: pods_pb.GetPodResourcesRequest, call: PluginCall
    ) -> pods_pb.GetPodResourcesResponse:
        """Answer for one pod, as a kubelet of version 1.34 or later does; Kata asks while the pod is created."""
        pod = self.pods.get(request.pod_name)
        if pod is None or request.pod_namespace != NAMESPACE:
            text = f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
            await call.abort(grpc.StatusCode.UNKNOWN, text)
        return pods_pb.GetPodResourcesResponse(pod_resources=_resources_of(pod))

    async def _get_allocatable(
        self, _request: pods_pb.AllocatableResourcesRequest, call: PluginCall
    ) -> pods_pb.AllocatableResourcesResponse:
        if self.allocatable_fails is not None:
            await call.abort(self.allocatable_fails, "rejected by rate limit")
        return pods_pb.AllocatableResourcesResponse(
            devices=[
                pods_pb.ContainerDevices(resource_name=name, device_ids=[device])
                for name, resource in sorted(self.manager.resources.items())
                for device in sorted(resource.healthy)
            ]
        )

    def _write_checkpoint(self) -> None:
        if self.overtakes_writes:
            return
        replace_file(self.paths.checkpoint, self.manager.checkpoint(), durable=False)

    def _write_claims(self) -> None:
        replace_file(self.paths.claims, claims.encode(self.pods.values()), durable=False)

    def _uids_of_pods(self) -> list[str]:
        return [pod.uid for pod in self.pods.values()]


@asynccontextmanager
async def running(root: Path, clock: Clock) -> AsyncIterator[SimKubelet]:
    """Run a kubelet whose folder is `root`, for as long as the context lasts."""
    async with asyncio.TaskGroup() as group:
        kubelet = SimKubelet(root, clock, group)
        try:
            await kubelet.start()
            yield kubelet
        finally:
            await kubelet.stop()


def _numa_node(device: pb.Device) -> int | None:
    return device.topology.nodes[0].ID if device.topology.nodes else None


def _resources_of(pod: Pod) -> pods_pb.PodResources:
    """Return a pod's entry in the answer to List; init containers are left out."""
    containers = [container for container in pod.containers if not container.init]
    return pods_pb.PodResources(
        name=pod.name,
        namespace=NAMESPACE,
        containers=[
            pods_pb.ContainerResources(
                name=container.name,
                devices=[
                    pods_pb.ContainerDevices(resource_name=held.resource, device_ids=held.devices)
                    for held in pod.held
                    if held.container == container.name
                ],
                dynamic_resources=[
                    pods_pb.DynamicResource(
                        claim_name=f"{pod.name}-{number}",
                        claim_namespace=NAMESPACE,
                        claim_resources=[pods_pb.ClaimResource(driver_name=claim.driver, device_name=claim.device)],
                    )
                    for number, claim in enumerate(container.claims)
                ],
            )
            for container in containers
        ],
    )
