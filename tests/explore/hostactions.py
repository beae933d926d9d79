"""Actions of actors on the host: VMs and processes, changes by hand, failing drivers, hotplug, a reboot."""

from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.function import SimFunction
from tests.explore.reduction import KERNEL
from tests.explore.scenario import Action
from tests.explore.world import World


@dataclass(frozen=True)
class StartVm(Action):
    """The VM of a pod starts, and opens the pod's devices."""

    pod: str

    @override
    def enabled(self, world: World) -> bool:
        return world.kubelet.runs(self.pod) and not world.kubelet.pods[self.pod].rebooted

    @override
    def act(self, world: World) -> None:
        for group in sorted(world.kubelet.pods[self.pod].groups):
            try:
                world.processes[self.pod] = world.kernel.start_vm(IommuGroup(group))
            except (OSError, KeyError) as error:
                devices = world.observer.devices_of(world.kubelet.pods[self.pod])
                if world.pulled & devices or any(any(world.observer.users(device)) for device in devices):
                    continue  # the group is no longer viable, or another process has opened it
                world.observer.fail("unusable", f"the VM of {self.pod} can't open group {group}: {error}")


@dataclass(frozen=True)
class Reboot(Action):
    """The host loses power and boots again: functions have native drivers, and the kubelet reads its checkpoint."""

    loses_power = True

    @override
    def act(self, world: World) -> None:
        world.reboot()
        world.kubelet.start()


@dataclass(frozen=True)
class Open(Action):
    """A process of the host opens a node of a function's native driver, unless the driver refuses new clients."""

    is_by_hand = True
    touches = frozenset({KERNEL})
    name: str
    gpu: PciAddress
    node: int = 0
    """The index of the node among the function's nodes."""
    command: str = "python3"
    """The name of the process."""

    @override
    def enabled(self, world: World) -> bool:
        return bool(world.kernel.nodes_of(self.gpu)) and not world.kernel.nvidia.is_locked(self.gpu)

    @override
    def act(self, world: World) -> None:
        node = world.kernel.nodes_of(self.gpu)[self.node]
        world.processes[self.name] = world.kernel.open_native(self.gpu, self.command, node)


@dataclass(frozen=True)
class OpenGroup(Action):
    """A user starts a VM by hand, without the kubelet."""

    is_by_hand = True
    touches = frozenset({KERNEL})
    name: str
    group: int

    @override
    def enabled(self, world: World) -> bool:
        group = world.kernel.vfio.groups[IommuGroup(self.group)]
        return bool(group.vfio_devices) and group.user is None

    @override
    def act(self, world: World) -> None:
        world.processes[self.name] = world.kernel.start_vm(IommuGroup(self.group), "qemu-by-hand")


@dataclass(frozen=True)
class OpenVgpu(Action):
    """A user starts a VM with the first free vGPU by hand, without the kubelet."""

    is_by_hand = True
    name: str

    @override
    def enabled(self, world: World) -> bool:
        return any(self._free(world))

    @override
    def act(self, world: World) -> None:
        world.processes[self.name] = world.kernel.start_vm(next(self._free(world)), "qemu-by-hand")

    def _free(self, world: World) -> Iterator[IommuGroup]:
        given = {key for pod in world.kubelet.pods.values() for key in (pod.keys if pod.has_devices else ())}
        for vgpu, found in sorted(world.kernel.mdev.devices.items()):
            group = world.kernel.vfio.groups.get(found.group)
            if group is not None and group.user is None and vgpu not in {str(device) for _, device in given}:
                yield found.group


@dataclass(frozen=True)
class Close(Action):
    """A process that an actor has started ends."""

    name: str

    @override
    def enabled(self, world: World) -> bool:
        return self.name in world.processes

    @override
    def act(self, world: World) -> None:
        world.kernel.end_vm(world.processes.pop(self.name))


@dataclass(frozen=True)
class Refuse(Action):
    """The kernel refuses writes to a file from now on."""

    touches = frozenset({KERNEL})
    path: str
    errno: int

    @override
    def act(self, world: World) -> None:
        world.kernel.faults.refuse(HostPath(self.path), self.errno)


@dataclass(frozen=True)
class Block(Action):
    """The kernel keeps each writer of a file asleep from now on."""

    touches = frozenset({KERNEL})
    path: str

    @override
    def act(self, world: World) -> None:
        world.kernel.faults.asleep.add(HostPath(self.path))


@dataclass(frozen=True)
class Mend(Action):
    """The kernel accepts all writes again."""

    touches = frozenset({KERNEL})

    @override
    def act(self, world: World) -> None:
        world.kernel.faults.heal()


@dataclass(frozen=True)
class Unplug(Action):
    """A free GPU is unplugged."""

    is_by_hand = True
    gpu: PciAddress

    @override
    def enabled(self, world: World) -> bool:
        function = world.kernel.pci.functions.get(self.gpu)
        return function is not None and not function.leaving and not any(world.observer.users(self.gpu))

    @override
    def act(self, world: World) -> None:
        world.pulled.add(self.gpu)
        world.kernel.unplug(self.gpu)


@dataclass(frozen=True)
class PlugIn(Action):
    """A GPU is plugged in again; the kernel binds it to its native driver."""

    gpu: PciAddress

    @override
    def enabled(self, world: World) -> bool:
        return self.gpu in world.kernel.pci.removed

    @override
    def act(self, world: World) -> None:
        world.kernel.plug_in(self.gpu)


@dataclass(frozen=True)
class OpenDevice(Action):
    """A starting VM has opened a VFIO device node, and has not bound the device yet."""

    is_by_hand = True
    name: str
    gpu: PciAddress
    before_lease: bool = False
    """Only while no process has the group open."""

    @override
    def enabled(self, world: World) -> bool:
        function = world.kernel.pci.functions[self.gpu]
        is_free = function.group is not None and world.kernel.vfio.groups[function.group].user is None
        return function.driver == "vfio-pci" and (is_free or not self.before_lease)

    @override
    def act(self, world: World) -> None:
        folder = world.kernel.tree.folder(HostPath(f"/sys/bus/pci/devices/{self.gpu}/vfio-dev"))
        world.processes[self.name] = world.kernel.open_devices(list(folder.entries), "qemu-by-hand", bind=False)


@dataclass(frozen=True)
class Rebind(Action):
    """A user binds a free GPU to another driver."""

    gpu: PciAddress
    driver: str

    @override
    def enabled(self, world: World) -> bool:
        function = world.kernel.pci.functions[self.gpu]
        has_pod = any(
            pod.has_devices and self.gpu in world.observer.devices_of(pod) for pod in world.kubelet.pods.values()
        )
        is_asking = any(pod.asked is None and not pod.answered for pod in world.kubelet.pods.values())
        return not (has_pod or is_asking or function.leaving or any(world.observer.users(self.gpu)))

    @override
    def act(self, world: World) -> None:
        world.kernel.rebind(self.gpu, self.driver)


@dataclass(frozen=True)
class DriverRefuses(Action):
    """A driver no longer binds to functions, and a write to drivers_probe returns no error."""

    driver: str

    @override
    def act(self, world: World) -> None:
        bind = world.kernel.pci.bind

        def refuse(function: SimFunction, driver: str) -> None:
            if driver != self.driver:
                bind(function, driver)

        world.refusing = self.driver
        vars(world.kernel.pci)["bind"] = refuse


@dataclass(frozen=True)
class DriverAccepts(Action):
    """The driver binds to functions again."""

    @override
    def act(self, world: World) -> None:
        world.refusing = None
        vars(world.kernel.pci).pop("bind", None)
