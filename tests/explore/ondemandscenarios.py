"""Scenarios of on-demand vGPUs: one T4 that takes the shape of the pod that starts."""

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from typing_extensions import override

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.desired.observed import NodeSpec
from gpuvirt.sim.hostspec import HostSpec, SlotSpec
from tests.explore.actions import (
    DeleteByForce,
    DeleteCheckpoint,
    EndPod,
    Kill,
    LoseAccount,
    LoseLedger,
    MendAccount,
    Start,
    StartKubelet,
    StopKubelet,
    Want,
)
from tests.explore.hostactions import Mend, Reboot, Refuse
from tests.explore.kubelet import Key
from tests.explore.scenario import Action, Scenario
from tests.explore.world import World

GPU = PciAddress("0000:65:00.0")
T4 = HostSpec(about="one T4 for vGPUs on demand", slots=(SlotSpec(at=GPU, board="T4", group=12, numa=0),))
HALF, WHOLE = "tencent.com/vgpu-233", "tencent.com/vgpu-234"
CREATE = f"/sys/bus/pci/devices/{GPU}/mdev_supported_types/nvidia-233/create"


@dataclass(frozen=True)
class AdmitVgpu(Action):
    """The kubelet admits a pod that requests a type of vGPU, by a new id, or `again` by that of an ended pod."""

    pod: str
    resource: str
    again: bool = False

    @override
    def enabled(self, world: World) -> bool:
        return world.agents.running is not None and not world.kubelet.is_admitting and any(self._free(world))

    @override
    def act(self, world: World) -> None:
        world.admit(self.pod, (next(self._free(world)),))

    def _free(self, world: World) -> Iterator[Key]:
        had = {key for pod in world.kubelet.pods.values() for key in pod.keys}
        free = (key for key in world.kubelet.free() if key[0] == self.resource)
        return (key for key in free if (key in had) is self.again)


def _of(*actors: tuple[Action, ...]) -> Scenario:
    return Scenario(T4, NodeSpec("on-demand"), actors)


RESTART = (Kill(), Start())
ON_DEMAND_SCENARIOS: Mapping[str, Scenario] = {
    "on-demand-two-types": _of((AdmitVgpu("p", HALF), EndPod("p")), (AdmitVgpu("q", WHOLE),)),
    "on-demand-id-again": _of((AdmitVgpu("p", HALF), EndPod("p"), AdmitVgpu("q", HALF, again=True)), RESTART),
    "on-demand-removal-or-admission": _of(
        (AdmitVgpu("p", HALF), AdmitVgpu("q", HALF), EndPod("p")), (AdmitVgpu("r", HALF),)
    ),
    "on-demand-killed": _of((AdmitVgpu("p", HALF), AdmitVgpu("q", HALF)), RESTART),
    "on-demand-or-whole": _of((AdmitVgpu("p", HALF), EndPod("p")), (Want("passthrough"), Want("on-demand"))),
    "on-demand-deleted-by-force": _of((AdmitVgpu("p", HALF), DeleteByForce("p")), (AdmitVgpu("q", HALF),), RESTART),
    "on-demand-lost-ledger": _of((AdmitVgpu("p", HALF),), (Kill(), LoseLedger(), Start())),
    "on-demand-lost-account": _of((AdmitVgpu("p", HALF),), (LoseAccount(), MendAccount()), (EndPod("p"),)),
    "on-demand-and-kubelet": _of(
        (AdmitVgpu("p", HALF), EndPod("p")), (StopKubelet(), DeleteCheckpoint(), StartKubelet())
    ),
    "on-demand-create-fails": _of((AdmitVgpu("p", HALF),), (Refuse(CREATE, errno.EIO), Mend())),
    "on-demand-power-loss": _of((AdmitVgpu("p", HALF),), (Reboot(), Start())),
}
