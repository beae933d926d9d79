"""The scenarios that are explored by name."""

import errno
from collections.abc import Mapping

from explore.actions import (
    Admit,
    AdmitOther,
    Close,
    EndPod,
    Kill,
    LoseAccount,
    Mend,
    MendAccount,
    Open,
    OpenGroup,
    Pause,
    PlugIn,
    Reboot,
    Refuse,
    Start,
    StartKubelet,
    StartVm,
    StopKubelet,
    Unplug,
    Want,
)
from explore.world import Scenario
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.heard import NodeSpec
from gpuvirt.sim.machine import MachineSpec, SlotSpec

GPU, NEXT = PciAddress("0000:65:00.0"), PciAddress("0000:66:00.0")
GROUP = 12
ON_VFIO = MachineSpec(
    about="one A10 on vfio-pci", slots=(SlotSpec(at=GPU, board="A10", group=GROUP, numa=0, driver="vfio-pci"),)
)
NATIVE = MachineSpec(about="one A10 on nvidia", slots=(SlotSpec(at=GPU, board="A10", group=GROUP, numa=0),))
IN_ONE_GROUP = MachineSpec(
    about="two A10 in one IOMMU group",
    slots=(
        SlotSpec(at=GPU, board="A10", group=GROUP, numa=0, driver="vfio-pci"),
        SlotSpec(at=NEXT, board="A10", group=GROUP, numa=0, driver="vfio-pci"),
    ),
)
PASSTHROUGH, CONTAINER = NodeSpec("passthrough"), NodeSpec("container")
AWAY, BACK = Want("container"), Want("passthrough")
PROBE = "/sys/bus/pci/drivers_probe"

SCENARIOS: Mapping[str, Scenario] = {
    "return-or-admission": Scenario(ON_VFIO, PASSTHROUGH, ((Admit("vm"),), (AWAY,))),
    "return-and-back": Scenario(ON_VFIO, PASSTHROUGH, ((AWAY, BACK), (Admit("vm"),))),
    "pod-ends": Scenario(ON_VFIO, PASSTHROUGH, ((StartVm("vm"), EndPod("vm")), (AWAY,)), first=(Admit("vm"),)),
    "two-pods-of-one-group": Scenario(IN_ONE_GROUP, PASSTHROUGH, ((Admit("vm-a"),), (Admit("vm-b"),), (AWAY,))),
    "vm-by-hand": Scenario(ON_VFIO, PASSTHROUGH, ((OpenGroup("qemu", GROUP), Close("qemu")), (AWAY,))),
    "container-is-taken": Scenario(NATIVE, CONTAINER, ((Open("job", GPU), Close("job")), (BACK,))),
    "pod-of-another-plugin": Scenario(
        NATIVE,
        CONTAINER,
        ((EndPod("cuda"),), (BACK,), (StopKubelet(), StartKubelet())),
        first=(AdmitOther("cuda", GPU),),
    ),
    "kubelet-restarts": Scenario(ON_VFIO, PASSTHROUGH, ((AWAY,), (StopKubelet(), StartKubelet()), (Admit("vm"),))),
    "account-is-lost": Scenario(ON_VFIO, PASSTHROUGH, ((AWAY,), (LoseAccount(), MendAccount()), (Admit("vm"),))),
    "killed": Scenario(ON_VFIO, PASSTHROUGH, ((AWAY,), (Kill(), Start()), (Admit("vm"),))),
    "killed-on-the-way-back": Scenario(NATIVE, CONTAINER, ((BACK,), (Kill(), Start()))),
    "rebooted": Scenario(ON_VFIO, PASSTHROUGH, ((AWAY,), (Admit("vm"),), (Reboot(), Start()))),
    "a-step-fails": Scenario(
        ON_VFIO, PASSTHROUGH, ((AWAY,), (Refuse(PROBE, errno.EIO), Pause(100.0), Mend()), (Admit("vm"),))
    ),
    "unplugged": Scenario(
        ON_VFIO,
        PASSTHROUGH,
        ((Unplug(GPU), PlugIn(GPU)), (StopKubelet(), StartKubelet(), StopKubelet(), StartKubelet()), (Admit("vm"),)),
    ),
}
