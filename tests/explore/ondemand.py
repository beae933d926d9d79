"""On-demand vGPUs in exploration: the starts of pods that have them, and what holds for the vGPUs of pods."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from gpuvirt.facts.ids import DeviceId
from gpuvirt.kubelet import wire
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.node.allocation.allocator import AllocationRefusedError
from tests.explore.agenda import Option
from tests.explore.kubelet import Pod
from tests.explore.observer import ViolationError
from tests.explore.scheduler import KilledError

if TYPE_CHECKING:
    from tests.explore.agents import Running
    from tests.explore.world import World

BACK_OFF_S = 10.0
"""The kubelet's pause before it tries again to start a container."""
DELETED_AFTER_STARTS = 3
"""The refused starts after which a pod's user deletes it."""


class OnDemandKubelet:
    """The kubelet's calls before a container with on-demand vGPUs starts."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._tenants: dict[str, str] = {}
        """The pod that has started with each vGPU."""

    def take_answer(self, pod: Pod, answer: Attachment) -> None:
        """Take the answer to Allocate for a pod with such a vGPU, which the kubelet records as it is."""
        if not any(is_on_demand_id(device) for _, device in pod.keys):
            return
        pod.answer = wire.allocate_response((answer,)).container_responses[0].SerializeToString()
        pod.vgpus = frozenset(vgpu for value in answer.env.values() for vgpu in value.split(","))
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
        if serving is None or not kubelet.up:
            return
        for pod in kubelet.pods.values():
            if pod.vgpus and pod.known and pod.may_start and not (pod.deleted or pod.ended or pod.forgotten):
                yield Option(f"the kubelet starts {pod.name}", partial(self._start, pod, serving), ("start", pod.name))

    def _start(self, pod: Pod, running: "Running") -> None:
        pod.may_start = False
        self._starting = running.loop.create_task(self._call(pod, running))

    async def _call(self, pod: Pod, running: "Running") -> None:
        world, resource = self._world, pod.keys[0][0]
        try:
            await running.agent.pre_start(resource, [DeviceId(device) for _, device in pod.keys])
        except (AllocationRefusedError, KilledError, asyncio.CancelledError) as error:
            world.scheduler.add_line(f"  {pod.name} does not start: {error}")
            self._try_again(pod)
            return
        if pod.ended or pod.deleted:
            return
        pod.started = True
        for vgpu in pod.vgpus:
            self._judge(pod, vgpu)
            self._tenants[vgpu] = pod.name
            world.processes[pod.name] = world.kernel.start_vm(world.kernel.mdev.devices[vgpu].group)
        world.scheduler.add_line(f"  {pod.name} starts with {', '.join(pod.vgpus)}")

    def _try_again(self, pod: Pod) -> None:
        """Have the kubelet try again after its back-off, until the pod's user does what the refusal says."""
        world = self._world
        pod.refused_starts += 1
        if pod.refused_starts == DELETED_AFTER_STARTS:
            world.scheduler.add_line(f"  its user deletes {pod.name}")
            world.kubelet.end(pod)
            return

        def back_off_ends() -> None:
            pod.may_start = True

        world.clock.call_later(BACK_OFF_S, back_off_ends)
        world.horizon_s = max(world.horizon_s, world.clock.monotonic_s() + BACK_OFF_S)

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
        return None
