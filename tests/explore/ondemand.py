"""On-demand vGPUs in exploration: the starts of pods that have them, and what holds for the vGPUs of pods."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.facts.ids import DeviceId, PodUid
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.offers.ondemand.offer import PodEnds
from gpuvirt_sim.devices.vgpu import SimVgpuHost
from tests.explore.agenda import Option
from tests.explore.kubelet import Key, Pod
from tests.explore.observer import ViolationError
from tests.explore.readmission import BACK_OFF_S, verify_nodes
from tests.explore.scheduler import KilledError, Process

if TYPE_CHECKING:
    from tests.explore.agents import Running
    from tests.explore.world import World


class EndingPods:
    """The pods that are being deleted, and those of them that have ended, as the API server reports them to agents."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._uids: frozenset[PodUid] = frozenset()
        self._observed: dict[Process, PodEnds] = {}

    def begin(self, pod: Pod) -> None:
        """Begin the deletion of a pod, which may last."""
        self._uids |= {PodUid(pod.uid)}

    @property
    def _ends(self) -> PodEnds:
        running = {pod.uid for pod in self._world.kubelet.pods.values() if not pod.ended}
        ended = frozenset(uid for uid in self._uids if uid not in running)
        return PodEnds(ended, self._uids - ended)

    def possible_events(self) -> Iterator[Option]:
        """Yield the agents' observations."""
        for agent in self._world.agents.all:
            if self._observed.get(agent.process, PodEnds()) != self._ends:
                name = f"{agent.process.name} observes the pods that end"
                yield Option(name, partial(self._observe, agent), ("ending", agent.process))

    def _observe(self, agent: "Running") -> None:
        self._observed[agent.process] = self._ends
        agent.loop.call_soon(agent.agent.observations.observe_pod_ends, self._ends)


class OnDemandKubelet:
    """The kubelet's calls before a container with on-demand vGPUs starts."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._tenants: dict[str, str] = {}
        """The pod that has started with each vGPU."""
        self._asked: dict[str, Process] = {}
        """The agents that were asked for the starts of pods, and have not answered."""
        self.had: set[Key] = set()
        """The ids of all pods so far."""
        self.ending = EndingPods(world)

    def take_answer(self, pod: Pod, answer: Attachment) -> None:
        """Take the answer to Allocate for a pod with such a vGPU."""
        if not any(is_on_demand_id(device) for _, device in pod.keys):
            return
        before = pod.vgpus
        pod.vgpus = frozenset(vgpu for value in answer.env.values() for vgpu in value.split(","))
        if before and before != pod.vgpus:
            self._world.observer.violated("changed", f"containers of {pod.name} have {before} and {pod.vgpus}")
        pod.may_start = True
        for vgpu in pod.vgpus:
            self._judge(pod, vgpu)

    def _judge(self, pod: Pod, vgpu: str) -> None:
        """Assert that a pod's vGPU exists, and that no other pod has started with it."""
        world = self._world
        if vgpu not in world.kernel.mdev.devices:
            world.observer.violated("given", f"{pod.name} was given {vgpu}, which does not exist")
        if self._tenants.get(vgpu, pod.name) != pod.name:
            world.observer.violated("old vGPU", f"{pod.name} was given {vgpu}, which {self._tenants[vgpu]} had")
        for other in world.kubelet.pods.values():
            if other is not pod and other.has_devices and vgpu in other.vgpus:
                world.observer.violated("two owners", f"{other.name} and {pod.name} both have {vgpu}")

    def possible_events(self) -> Iterator[Option]:
        """Yield the starts of containers whose vGPUs the kubelet has recorded."""
        serving, kubelet = self._world.agents.serving, self._world.kubelet
        if serving is None or not (kubelet.up and kubelet.has_pods):
            return
        for pod in kubelet.pods.values():
            if (asked := self._asked.get(pod.name)) is not None and asked.dead:
                del self._asked[pod.name]
                pod.may_start = True
            is_over = pod.deleted or pod.ended or pod.forgotten
            if pod.readmits and not is_over:
                continue
            if pod.vgpus and pod.known and pod.has_folder and pod.may_start and not is_over:
                yield Option(f"the kubelet starts {pod.name}", partial(self._start, pod, serving), ("start", pod.name))

    def _start(self, pod: Pod, running: "Running") -> None:
        pod.may_start = False
        self._asked[pod.name] = running.process
        self._starting = running.loop.create_task(self._call(pod, running))

    async def _call(self, pod: Pod, running: "Running") -> None:
        world, resource = self._world, pod.keys[0][0]
        try:
            await running.agent.allocators.pre_start(resource, [DeviceId(device) for _, device in pod.keys])
        except (AllocationRefusedError, KilledError, asyncio.CancelledError) as error:
            world.scheduler.add_line(f"  {pod.name} does not start: {error}")
            self._try_again(pod)
            return
        finally:
            self._asked.pop(pod.name, None)
        if pod.ended or pod.deleted:
            return
        pod.started = True
        verify_nodes(world.observer, world.kernel, pod, pod.vgpus)
        world.observer.verify_unshared(pod)
        for vgpu in pod.vgpus:
            self._judge(pod, vgpu)
            self._tenants[vgpu] = pod.name
            world.processes[pod.name] = world.kernel.start_vm(world.kernel.mdev.devices[vgpu].group)
        world.scheduler.add_line(f"  {pod.name} starts with {', '.join(pod.vgpus)}")

    def _try_again(self, pod: Pod) -> None:
        """Have the kubelet try again after its back-off, unless the pod was started again after a reboot meanwhile."""
        world = self._world

        def back_off_ends() -> None:
            pod.may_start |= not (pod.started or pod.name in self._asked)

        world.clock.call_later(BACK_OFF_S, back_off_ends)

    def reboot(self) -> None:
        """End all VMs; the kubelet will start the containers of its pods again, without a call of Allocate."""
        for pod in self._world.kubelet.pods.values():
            if pod.vgpus:
                self._world.processes.pop(pod.name, None)
                pod.started, pod.may_start, pod.rebooted = False, True, True

    def find_fault(self) -> ViolationError | None:
        """Return a vGPU without a pod, or a pod without its vGPU, in a world at rest."""
        world = self._world
        if not world.kubelet.up or world.kubelet.unreadable or world.kernel.faults.refusals:
            return None
        pods = [pod for pod in world.kubelet.pods.values() if pod.has_devices]
        given = frozenset[str]().union(*(pod.vgpus for pod in pods))
        live = set(world.kernel.mdev.devices)
        leaked = {vgpu for vgpu in live - given if not any(world.observer.users(vgpu))}
        if leaked and world.spec.mode == "on-demand" and not any(pod.forgotten for pod in pods):
            return ViolationError("leak", f"no pod has {', '.join(sorted(leaked))}")
        started = frozenset[str]().union(*(pod.vgpus for pod in pods if pod.name in world.processes))
        if lost := started - live:
            return ViolationError("lost", f"a pod runs with {', '.join(sorted(lost))}, which does not exist")
        for pod in pods:
            is_over = pod.forgotten or pod.deleted or self._has_old_groups(pod) or self._is_shown_as_gone(pod)
            if pod.vgpus and pod.known and not (pod.started or is_over):
                return ViolationError("lost", f"{pod.name} never starts with {', '.join(sorted(pod.vgpus))}")
        return self._miscounted()

    def _has_old_groups(self, pod: Pod) -> bool:
        """Return whether a pod's vGPUs are in other groups than before a reboot, so that the pod must be deleted."""
        live = self._world.kernel.mdev.devices
        if not pod.rebooted or not pod.vgpus <= live.keys():
            return False
        return pod.groups != {int(live[vgpu].group) for vgpu in pod.vgpus}

    def _is_shown_as_gone(self, pod: Pod) -> bool:
        """Return whether a pod's vGPUs were removed by hand, and its ids are unhealthy, so that it must be deleted."""
        lists = self._world.kubelet.lists
        is_healthy = any(lists.get(resource, {}).get(device, False) for resource, device in pod.keys)
        return pod.vgpus <= self._world.pulled and not is_healthy

    def _miscounted(self) -> ViolationError | None:
        """Return a type of which the kubelet counts another number of free vGPUs than the GPUs can still carry."""
        world, view = self._world, self._world.agents.view
        if view is None or world.spec.mode != "on-demand" or world.agents.serving is not world.agents.running:
            return None
        if any(pod.forgotten for pod in world.kubelet.pods.values()):
            return None
        hosts = [carrier.vgpu_host for carrier in world.kernel.vfs.carriers.values()]
        had = {key for pod in world.kubelet.pods.values() if pod.has_devices for key in pod.keys}
        for resource in view.resources:
            if resource.on_demand is None:
                continue
            listed = world.kubelet.lists.get(resource.name, {}).items()
            free = sum(healthy and (resource.name, device) not in had for device, healthy in listed)
            fit = sum(_fits(host, resource.on_demand) for host in hosts)
            if free != fit:
                return ViolationError("count", f"{resource.name} has {free} free vGPUs, and {fit} fit")
        return None


def _fits(host: SimVgpuHost, vgpu_type: str) -> int:
    """Return how many vGPUs of a type a GPU counts: one of each while it is idle."""
    left = sum(host.left(spec, slot) for spec in host.types if spec.name == vgpu_type for slot in host.slots)
    return left if host.live else min(left, 1)
