"""Scenarios of commands that users run beside an agent: forced, with functions of other slots, and of vGPUs."""

from collections.abc import Mapping

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.desired.observed import GpuNodeSpec
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.explore.actions import Admit, AdmitOther, EndPod, Kill, Start
from tests.explore.command import ApplyVgpus, Command, DeleteVgpu
from tests.explore.hostactions import Close, Open, OpenGroup, OpenVgpu, StartVm
from tests.explore.scenario import Action, Scenario

GPU, NEXT = PciAddress("0000:65:00.0"), PciAddress("0000:66:00.0")
GROUP = 12
NATIVE = HostSpec(about="one A10 on nvidia", slots=(SlotSpec(at=GPU, board="A10", group=GROUP, numa=0),))
ON_VFIO = HostSpec(
    about="one A10 on vfio-pci", slots=(SlotSpec(at=GPU, board="A10", group=GROUP, numa=0, driver="vfio-pci"),)
)
IN_ONE_GROUP = HostSpec(
    about="two A10 in one IOMMU group",
    slots=tuple(SlotSpec(at=gpu, board="A10", group=GROUP, numa=0) for gpu in (GPU, NEXT)),
)
HALVED = HostSpec(
    about="one T4 with two vGPUs",
    slots=(SlotSpec(at=GPU, board="T4", group=GROUP, numa=0, vgpus={VgpuType("GRID T4-8Q"): 2}),),
)
UNMANAGED = GpuNodeSpec("unmanaged")
FORCED = Command(GPU, DesiredDriver.PASSTHROUGH, forced=True)
RETURN = Command(GPU, DesiredDriver.NATIVE, forced=True)
BOTH = Command(GPU, DesiredDriver.PASSTHROUGH, also=frozenset({NEXT}))
TO_WHOLE = ApplyVgpus(GPU, ("T4-16Q",))
DELETE = DeleteVgpu(GPU)


def _of(host: HostSpec, *actors: tuple[Action, ...], first: tuple[Action, ...] = ()) -> Scenario:
    return Scenario(host, UNMANAGED, actors, first=first, begin_s=33.0)


COMMAND_SCENARIOS: Mapping[str, Scenario] = {
    "forced-command": _of(NATIVE, (FORCED,), (Open("job", GPU), Close("job"))),
    "forced-command-or-pod": _of(NATIVE, (FORCED,), (AdmitOther("cuda", GPU), EndPod("cuda"))),
    "forced-command-of-a-vm": _of(ON_VFIO, (RETURN,), (OpenGroup("qemu", GROUP), Close("qemu"))),
    "command-of-a-group": _of(IN_ONE_GROUP, (BOTH,), (Open("job", NEXT), Close("job"))),
    "command-of-a-group-or-pod": _of(IN_ONE_GROUP, (BOTH,), (AdmitOther("cuda", NEXT), EndPod("cuda"))),
    "vgpu-command-or-admission": _of(HALVED, (TO_WHOLE,), (Admit("vm"),)),
    "vgpu-command-in-use": _of(HALVED, (TO_WHOLE,), (StartVm("vm"), EndPod("vm")), first=(Admit("vm"),)),
    "vgpu-command-by-hand": _of(HALVED, (TO_WHOLE,), (OpenVgpu("qemu"), Close("qemu"))),
    "vgpu-command-after-the-agent": _of(HALVED, (Admit("vm"),), (Kill(), TO_WHOLE, Start())),
    "delete-command-or-admission": _of(HALVED, (DELETE,), (Admit("vm-a"), Admit("vm-b"))),
    "two-vgpu-commands": _of(HALVED, (TO_WHOLE,), (DELETE,), (Admit("vm"),)),
}
