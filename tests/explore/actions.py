"""Actions of actors on the cluster: desired state, the kubelet's pods and restarts, crashes of the agent."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from typing_extensions import override

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName
from gpuvirt.model.desired.observed import GpuNodeSpec
from gpuvirt.model.shares.node.records import is_unit_id
from gpuvirt_sim.devices.nvidia import gpu_uuid
from tests.explore.kubelet import Key
from tests.explore.reduction import DESIRED
from tests.explore.scenario import Action
from tests.explore.world import World


@dataclass(frozen=True)
class Want(Action):
    """The spec of the GpuNode sets the mode of the node's GPUs."""

    touches = frozenset({DESIRED})
    mode: str
    vgpu_config: str | None = None
    after_s: float = 0.0

    @override
    def enabled(self, world: World) -> bool:
        return world.clock.monotonic_s() >= self.after_s

    @override
    def act(self, world: World) -> None:
        world.spec = GpuNodeSpec(self.mode, vgpu_config=self.vgpu_config)
        world.desired_generation += 1


@dataclass(frozen=True)
class Pause(Action):
    """An actor waits until the host has run for a number of seconds."""

    until_s: float

    @override
    def enabled(self, world: World) -> bool:
        return world.clock.monotonic_s() >= self.until_s

    @override
    def act(self, world: World) -> None:
        return


@dataclass(frozen=True)
class Admit(Action):
    """The kubelet admits a pod with a device that it counts as free: the first, or a given device."""

    pod: str
    device: str | None = None

    @override
    def enabled(self, world: World) -> bool:
        return world.agents.running is not None and any(self._free(world))

    @override
    def act(self, world: World) -> None:
        world.admit(self.pod, (next(self._free(world)),))

    def _free(self, world: World) -> Iterator[Key]:
        return (key for key in world.kubelet.free() if self.device in {None, str(key[1])})


@dataclass(frozen=True)
class AdmitBeside(Admit):
    """The kubelet admits a pod whose init container has a device, and one of another plugin, which answers late."""

    answers_after_s: float = inf
    stops_writes: bool = False

    @override
    def act(self, world: World) -> None:
        world.admit(self.pod, (next(self._free(world)),), "init")
        pod = world.kubelet.pods[self.pod]
        pod.waits_for_other_s, pod.stops_writes = self.answers_after_s, self.stops_writes


@dataclass(frozen=True)
class AdmitOther(Action):
    """The kubelet admits a pod of NVIDIA's own plugin, which allocates a GPU with its native driver."""

    pod: str
    gpu: PciAddress
    after_s: float = 0.0

    @override
    def enabled(self, world: World) -> bool:
        return world.clock.monotonic_s() >= self.after_s and _serves_containers(world, self.gpu)

    @override
    def act(self, world: World) -> None:
        key = ResourceName("nvidia.com/gpu"), DeviceId(gpu_uuid(self.gpu))
        pod = world.kubelet.admit_by_other(self.pod, key, frozenset({self.gpu}), frozenset())
        world.observer.given_natively(pod, self.gpu)


def _serves_containers(world: World, gpu: PciAddress) -> bool:
    """Return whether a container of another plugin could start with a GPU now."""
    function = world.kernel.pci.functions.get(gpu)
    is_native = function is not None and function.driver == "nvidia" and gpu not in world.kernel.nvidia._locked
    return is_native and not world.kubelet.is_admitting


@dataclass(frozen=True)
class AdmitByGroup(Action):
    """The kubelet admits a pod of KubeVirt's own plugin, whose ids are groups, under the resource name of gpuvirt.

    Neither the kubelet nor KubeVirt's plugin knows that gpuvirt may give the device to another pod.
    """

    pod: str
    resource: str = "nvidia.com/GA102GL_A10"

    @override
    def enabled(self, world: World) -> bool:
        return world.kubelet.up and not world.kubelet.is_admitting and self._group(world) is not None

    @override
    def act(self, world: World) -> None:
        group = self._group(world)
        assert group is not None
        members = frozenset(world.kernel.vfio.groups[IommuGroup(group)].members)
        key = ResourceName(self.resource), DeviceId(str(group))
        world.kubelet.admit_by_other(self.pod, key, members, frozenset({group}))

    def _group(self, world: World) -> int | None:
        """Return the first group with a VFIO device that no pod has."""
        taken = {device for pod in world.kubelet.pods.values() for device in world.observer.devices_of(pod)}
        groups = world.kernel.vfio.groups
        used = (number for number in sorted(groups) if groups[number].vfio_devices)
        return next((number for number in used if not groups[number].members & taken), None)


@dataclass(frozen=True)
class EndPod(Action):
    """A pod with devices ends, and its VM with it."""

    pod: str

    @override
    def enabled(self, world: World) -> bool:
        return world.kubelet.runs(self.pod)

    @override
    def act(self, world: World) -> None:
        if (process := world.processes.pop(self.pod, None)) is not None:
            world.kernel.end_vm(process)
        world.kubelet.end(world.kubelet.pods[self.pod])


@dataclass(frozen=True)
class StopKubelet(Action):
    """The kubelet stops; pods run on."""

    @override
    def act(self, world: World) -> None:
        world.kubelet.stop()


@dataclass(frozen=True)
class StartKubelet(Action):
    """The kubelet starts again, with its checkpoint."""

    @override
    def enabled(self, world: World) -> bool:
        return not world.kubelet.up

    @override
    def act(self, world: World) -> None:
        world.kubelet.start()


@dataclass(frozen=True)
class LoseApiServer(Action):
    """The kubelet can't reach the API server from its next start on, so that it knows its checkpoint alone."""

    @override
    def act(self, world: World) -> None:
        world.kubelet.reaches_api_server = False


@dataclass(frozen=True)
class ReachApiServer(Action):
    """The kubelet gets its pods from the API server again."""

    @override
    def act(self, world: World) -> None:
        world.kubelet.reaches_api_server = world.kubelet.has_pods = True


@dataclass(frozen=True)
class DeleteCheckpoint(Action):
    """The kubelet's checkpoint is deleted: a running kubelet writes it again from its memory, at its next write."""

    @override
    def act(self, world: World) -> None:
        world.kubelet.paths.checkpoint.unlink(missing_ok=True)


@dataclass(frozen=True)
class RegisterOther(Action):
    """Another device plugin registers: the kubelet writes its checkpoint."""

    @override
    def enabled(self, world: World) -> bool:
        return world.kubelet.up

    @override
    def act(self, world: World) -> None:
        world.kubelet.write()


@dataclass(frozen=True)
class Silence(Action):
    """GetAllocatableResources fails from now on while List answers, and the kubelet takes no list of a plugin."""

    @override
    def act(self, world: World) -> None:
        world.kubelet.is_silent = True


@dataclass(frozen=True)
class Answer(Action):
    """GetAllocatableResources answers again."""

    @override
    def act(self, world: World) -> None:
        world.kubelet.is_silent = False


@dataclass(frozen=True)
class LoseAccount(Action):
    """Neither account of the kubelet can be read until it writes its checkpoint again."""

    @override
    def act(self, world: World) -> None:
        world.kubelet.unreadable = True
        world.kubelet.paths.checkpoint.write_bytes(b"{")


@dataclass(frozen=True)
class MendAccount(Action):
    """Both accounts can be read again."""

    @override
    def act(self, world: World) -> None:
        world.kubelet.unreadable = False
        world.kubelet.write()


@dataclass(frozen=True)
class StepClock(Action):
    """The wall clock is set forward or back; no time passes."""

    seconds: float

    @override
    def act(self, world: World) -> None:
        world.clock.step(self.seconds)


@dataclass(frozen=True)
class Kill(Action):
    """The agent is killed."""

    @override
    def enabled(self, world: World) -> bool:
        return world.agents.running is not None

    @override
    def act(self, world: World) -> None:
        world.agents.end()


@dataclass(frozen=True)
class Start(Action):
    """The agent is started again, after every strand of its predecessor has ended."""

    @override
    def enabled(self, world: World) -> bool:
        return world.agents.running is None and not world.is_dying and world.agents.can_start

    @override
    def act(self, world: World) -> None:
        world.agents.start()


@dataclass(frozen=True)
class StartBeside(Action):
    """A second agent is started beside the running agent, as when the pods of two DaemonSets overlap."""

    @override
    def enabled(self, world: World) -> bool:
        return world.agents.running is not None and world.agents.older is None

    @override
    def act(self, world: World) -> None:
        world.agents.start_beside()


@dataclass(frozen=True)
class EndOlder(Action):
    """The older of two agents is killed."""

    @override
    def enabled(self, world: World) -> bool:
        return world.agents.older is not None

    @override
    def act(self, world: World) -> None:
        world.agents.end_older()


@dataclass(frozen=True)
class AdmitUnknown(Action):
    """A pod has a GPU by an id that can't be mapped to a GPU of this host, such as the id of a MIG device."""

    pod: str
    gpu: PciAddress
    resource: str = "nvidia.com/gpu"

    @override
    def enabled(self, world: World) -> bool:
        return _serves_containers(world, self.gpu)

    @override
    def act(self, world: World) -> None:
        key = ResourceName(self.resource), DeviceId("MIG-4fd9f0a2" if self.resource == "nvidia.com/gpu" else "7")
        world.kubelet.admit_by_other(self.pod, key, frozenset({self.gpu}), frozenset())


@dataclass(frozen=True)
class LoseLedger(Action):
    """The agent's ledger is lost, as after the replacement of a disk."""

    @override
    def act(self, world: World) -> None:
        (world.disk.folder / "state/ledger.json").unlink(missing_ok=True)


@dataclass(frozen=True)
class AdmitShare(Action):
    """The kubelet admits a pod with units that it counts as free."""

    pod: str
    units: int

    @override
    def enabled(self, world: World) -> bool:
        return world.agents.running is not None and len(self._free(world)) >= self.units

    @override
    def act(self, world: World) -> None:
        world.shares.admit(self.pod, tuple(self._free(world)[: self.units]))

    def _free(self, world: World) -> list[Key]:
        return [key for key in world.kubelet.free() if is_unit_id(key[1])]


@dataclass(frozen=True)
class DeleteByForce(Action):
    """A pod is deleted by force: API server and kubelet forget it, and its container runs on."""

    pod: str

    @override
    def enabled(self, world: World) -> bool:
        return world.kubelet.runs(self.pod)

    @override
    def act(self, world: World) -> None:
        world.kubelet.pods[self.pod].deleted = True
        world.shares.forget(self.pod)


@dataclass(frozen=True)
class EndSharer(Action):
    """The container of a pod with a share ends, and the pod with it."""

    pod: str

    @override
    def enabled(self, world: World) -> bool:
        return self.pod in world.processes

    @override
    def act(self, world: World) -> None:
        world.kernel.end_vm(world.processes.pop(self.pod))
        world.kubelet.end(world.kubelet.pods[self.pod])
        world.shares.forget(self.pod)
