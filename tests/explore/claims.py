"""Claims (DRA) in exploration: the kubelet's calls for them, its record of them, and what holds for their GPUs.

The scheduler is unkind: it may give a GPU to any claim at any time, as one does that reads a stale slice. Nothing but
the agent keeps two claims apart.
"""

import asyncio
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from gpuvirt.agent.claims.preparing import ClaimRef, ReservedClaim
from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.facts.ids import ClaimUid, DeviceId, PciAddress, PodUid
from gpuvirt.model.allocation.claims import DRIVER, Claim, ClaimedGpu, Shape, device_name
from gpuvirt.model.dra.claimfiles import spec_name
from gpuvirt.model.reasons import claims
from tests.explore.agenda import Option
from tests.explore.kubelet import Pod
from tests.explore.observer import ViolationError
from tests.explore.readmission import BACK_OFF_S, groups_behind, verify_nodes
from tests.explore.scenario import Action
from tests.explore.scheduler import KilledError, Process

if TYPE_CHECKING:
    from tests.explore.agents import Running
    from tests.explore.world import World


@dataclass(eq=False)
class Call:
    """A call of the kubelet for a claim that is not answered yet."""

    process: Process


class ClaimKubelet:
    """The claims of pods on the node, as the kubelet and the API server have them."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._calls: dict[str, Call] = {}
        """By pod; a kubelet that stops forgets its calls."""
        self._pausing: set[str] = set()

    @property
    def _pods(self) -> list[Pod]:
        return [pod for pod in self._world.kubelet.pods.values() if pod.is_claimer]

    def bind(self, name: str, gpu: PciAddress) -> None:
        """Give a GPU to a claim, and a node to its pod."""
        pod = self._world.kubelet.begin(name, ((DRIVER, DeviceId(gpu)),))
        pod.is_claimer = True
        self._record()

    async def read(self, ref: ClaimRef) -> ReservedClaim:
        """Return a claim as the API server has it; raise AllocationRefusedError."""
        pod = self._world.kubelet.pods.get(ref.name)
        if pod is None:
            raise AllocationRefusedError(claims.unknown(ref.name, "it does not exist"))
        return ReservedClaim(_claim(pod), frozenset({PodUid(pod.uid)}))

    def possible_events(self) -> Iterator[Option]:
        """Yield the calls that the kubelet can make now."""
        kubelet, running = self._world.kubelet, self._world.agents.running
        if not (kubelet.up and kubelet.has_pods):
            self._calls.clear()
            return
        for pod in self._pods if running is not None else ():
            call = self._calls.get(pod.name)
            if (call is not None and not call.process.dead) or pod.name in self._pausing:
                continue
            if pod.ended or not pod.answered:
                what = "gives back" if pod.ended else "asks for"
                make = partial(self._begin, pod, running)
                yield Option(f"the kubelet {what} the claim of {pod.name}", make, ("claim", pod.name))

    def _begin(self, pod: Pod, running: "Running | None") -> None:
        if running is None:
            return
        call = self._calls[pod.name] = Call(running.process)
        self._asking = running.loop.create_task(self._call(pod, running, call, reached_at=self._now))

    @property
    def _now(self) -> int:
        return len(self._world.scheduler.choices)

    async def _call(self, pod: Pod, running: "Running", call: Call, reached_at: int) -> None:
        world, preparing = self._world, running.agent.preparing
        assert preparing is not None
        ref, is_ending = ClaimRef(ClaimUid(pod.uid), "default", pod.name), pod.ended
        try:
            await (preparing.unprepare(ref) if is_ending else preparing.prepare(ref))
        except (AllocationRefusedError, KilledError, asyncio.CancelledError) as error:
            world.scheduler.add_line(f"  the claim of {pod.name} waits: {error}")
            if self._calls.get(pod.name) is call:
                self._pause(pod)
            return
        if self._calls.pop(pod.name, None) is not call:
            world.scheduler.add_line(f"  nobody takes the answer for {pod.name}")
        elif is_ending:
            del world.kubelet.pods[pod.name]
            world.scheduler.add_line(f"  the claim of {pod.name} is given back")
            self._record()
        elif not pod.ended:
            self._take(pod, disturbed=world.by_hand_at >= reached_at)

    def _take(self, pod: Pod, *, disturbed: bool) -> None:
        """Take the answer for a claim: its pod has the nodes of its CDI spec."""
        world, (_, gpu) = self._world, pod.keys[0]
        path = world.disk.folder / "state" / spec_name(ClaimUid(pod.uid))
        (device,) = json.loads(path.read_text())["devices"]
        pod.nodes = tuple(node["path"] for node in device["containerEdits"]["deviceNodes"])
        pod.groups, pod.answered, pod.known = groups_behind(world.kernel, pod.nodes), True, True
        world.scheduler.add_line(f"  {pod.name} is given {gpu}")
        if not disturbed:
            verify_nodes(world.observer, world.kernel, pod, (str(gpu),))
        world.observer.given(pod, disturbed=disturbed)
        self._record()

    def _pause(self, pod: Pod) -> None:
        """Have the kubelet call again after its back-off."""
        self._calls.pop(pod.name, None)
        self._pausing.add(pod.name)
        self._world.clock.call_later(BACK_OFF_S, partial(self._pausing.discard, pod.name))

    def _record(self) -> None:
        """Write the kubelet's record: a claim has no devices in it before it is prepared."""
        found = [
            {
                "ClaimUID": pod.uid,
                "ClaimName": pod.name,
                "Namespace": "default",
                "PodUIDs": {pod.uid: {}},
                "DriverState": {DRIVER: {"Devices": [{"DeviceName": _device(pod)}] if pod.known else []}},
            }
            for pod in self._pods
        ]
        data, kubelet = json.dumps({"ClaimInfoStateList": found}), self._world.kubelet
        path = kubelet.paths.claims
        path.write_text(json.dumps({"Data": data, "Checksum": zlib.crc32(data.encode())}))
        kubelet.durable(path)
        kubelet.durable(path.parent)

    def reboot(self) -> None:
        """End all VMs; the kubelet asks for the claims of its pods again, which its record has."""
        self._calls.clear()
        for pod in self._pods:
            self._world.processes.pop(pod.name, None)
            pod.answered, pod.groups, pod.listed = False, frozenset(), False

    def find_fault(self) -> ViolationError | None:
        """Return a claim that is not given back, or that nothing keeps from its GPU, in a world at rest."""
        world = self._world
        if not world.kubelet.up or world.kubelet.unreadable or world.kernel.faults.refusals or world.refusing:
            return None
        for pod in self._pods:
            gpu = PciAddress(pod.keys[0][1])
            parts = world.observer.with_dependents(gpu)
            if any(any(world.observer.users(part)) for part in parts):
                continue
            if pod.ended:
                return ViolationError("leak", f"the claim of {pod.name} is never given back")
            others = (other for other in world.kubelet.pods.values() if other is not pod)
            is_had = any(world.observer.devices_of(other) & parts for other in others)
            is_for_claims = world.spec.gpus.get(gpu, world.spec.mode) == "claims"
            if not (pod.answered or is_had) and is_for_claims and gpu in world.kernel.pci.functions:
                return ViolationError("lost", f"{pod.name} never gets {gpu}")
        return None


def _device(pod: Pod) -> str:
    return device_name(PciAddress(pod.keys[0][1]), Shape.PASSTHROUGH)


def _claim(pod: Pod) -> Claim:
    gpu = ClaimedGpu("gpu", PciAddress(pod.keys[0][1]), Shape.PASSTHROUGH, _device(pod))
    return Claim(ClaimUid(pod.uid), "default", pod.name, f"node01/{DRIVER}", (gpu,))


@dataclass(frozen=True)
class Bind(Action):
    """A scheduler gives a GPU to the claim of a pod, even one that another claim has, and binds the pod to the node."""

    pod: str
    gpu: PciAddress

    @override
    def act(self, world: "World") -> None:
        world.claims.bind(self.pod, self.gpu)


@dataclass(frozen=True)
class EndClaimer(Action):
    """A pod with a claim ends, whether it got its GPU or not; its VM may run on for a while (`Close` ends that)."""

    pod: str
    leaves_vm: bool = False

    @override
    def enabled(self, world: "World") -> bool:
        pod = world.kubelet.pods.get(self.pod)
        return pod is not None and not pod.ended

    @override
    def act(self, world: "World") -> None:
        if not self.leaves_vm and (process := world.processes.pop(self.pod, None)) is not None:
            world.kernel.end_vm(process)
        world.kubelet.end(world.kubelet.pods[self.pod])
