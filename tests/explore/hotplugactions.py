"""Actions of actors on the host: GPUs that leave it while pods have them, and uevents that are lost."""

from dataclasses import dataclass

from typing_extensions import override

from gpuvirt.facts.ids import PciAddress
from tests.explore.reduction import KERNEL
from tests.explore.scenario import Action
from tests.explore.world import World


@dataclass(frozen=True)
class LoseUevents(Action):
    """No uevent reaches a program of the host from now on, as when the buffers of their sockets are full."""

    touches = frozenset({KERNEL})

    @override
    def act(self, world: World) -> None:
        world.kernel.lose_uevents()


@dataclass(frozen=True)
class UnplugUsed(Action):
    """A GPU on its native driver is unplugged, though a pod has it or processes have it open.

    The pod keeps the GPU by the kubelet's record. (The kernel unplugs no GPU that a VM has open before the VM ends.)
    """

    is_by_hand = True
    gpu: PciAddress

    @override
    def enabled(self, world: World) -> bool:
        function = world.kernel.pci.functions.get(self.gpu)
        if function is None or function.leaving or function.driver != function.native_driver:
            return False
        pods = (pod for pod in world.kubelet.pods.values() if pod.has_devices)
        return any(world.observer.users(self.gpu)) or any(self.gpu in world.observer.devices_of(pod) for pod in pods)

    @override
    def act(self, world: World) -> None:
        world.pulled.add(self.gpu)
        world.kernel.unplug(self.gpu)
