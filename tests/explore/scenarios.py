"""The named scenarios."""

import errno
from collections.abc import Mapping

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings, ShareSettings
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, shared_cards
from tests.explore.actions import (
    Admit,
    AdmitByGroup,
    AdmitOther,
    AdmitShare,
    AdmitUnknown,
    Answer,
    DeleteByForce,
    DeleteCheckpoint,
    EndOlder,
    EndPod,
    EndSharer,
    Kill,
    LoseAccount,
    LoseLedger,
    MendAccount,
    Pause,
    RegisterOther,
    Silence,
    Start,
    StartBeside,
    StartKubelet,
    StepClock,
    StopKubelet,
    Want,
)
from tests.explore.claimscenarios import CLAIM_SCENARIOS
from tests.explore.command import Command
from tests.explore.commandscenarios import COMMAND_SCENARIOS
from tests.explore.gatescenarios import GATE_SCENARIOS
from tests.explore.hostactions import (
    Close,
    DriverAccepts,
    DriverRefuses,
    Mend,
    Open,
    OpenDevice,
    OpenGroup,
    OpenVgpu,
    PlugIn,
    Rebind,
    Reboot,
    Refuse,
    StartVm,
    Unplug,
)
from tests.explore.hotplugscenarios import HOTPLUG_SCENARIOS
from tests.explore.instancescenarios import INSTANCE_SCENARIOS
from tests.explore.nativescenarios import NATIVE_SCENARIOS
from tests.explore.neighbourscenarios import NEIGHBOUR_SCENARIOS
from tests.explore.observer import UNITS
from tests.explore.ondemandscenarios import ON_DEMAND_SCENARIOS
from tests.explore.rebootscenarios import REBOOT_SCENARIOS
from tests.explore.scenario import Action, Scenario
from tests.explore.vendorscenarios import VENDOR_SCENARIOS

GPU, NEXT = PciAddress("0000:65:00.0"), PciAddress("0000:66:00.0")
GROUP = 12
ON_VFIO = HostSpec(
    about="one A10 on vfio-pci", slots=(SlotSpec(at=GPU, board="A10", group=GROUP, numa=0, driver="vfio-pci"),)
)
NATIVE = HostSpec(about="one A10 on nvidia", slots=(SlotSpec(at=GPU, board="A10", group=GROUP, numa=0),))
CDEVS = HostSpec(
    about="one A10 on vfio-pci, with a node of its own",
    iommufd=True,
    slots=(SlotSpec(at=GPU, board="A10", group=GROUP, numa=0, driver="vfio-pci"),),
)
CDEVS_ALONE = HostSpec(
    about="one A10 on vfio-pci, whose group has no node",
    iommufd=True,
    group_nodes=False,
    slots=(SlotSpec(at=GPU, board="A10", group=GROUP, numa=0, driver="vfio-pci"),),
)
FEW_VFS = HostSpec(
    about="one A10 on nvidia, which makes vGPUs on four VFs",
    boards={"A10 of four": msgspec.structs.replace(shared_cards()["A10"], total_vfs=4)},
    slots=(SlotSpec(at=GPU, board="A10 of four", group=GROUP, numa=0),),
)
IN_ONE_GROUP = HostSpec(
    about="two A10 in one IOMMU group",
    slots=(
        SlotSpec(at=GPU, board="A10", group=GROUP, numa=0, driver="vfio-pci"),
        SlotSpec(at=NEXT, board="A10", group=GROUP, numa=0, driver="vfio-pci"),
    ),
)
WITHOUT_RESET = PlatformSpec(without_reset=(GPU,))
KEEPS_MEMORY = msgspec.structs.replace(ON_VFIO, about="one A10 on vfio-pci that can't be reset", platform=WITHOUT_RESET)
KEEPS_MEMORY_NATIVE = msgspec.structs.replace(
    NATIVE, about="one A10 on nvidia that can't be reset", platform=WITHOUT_RESET
)
PASSTHROUGH, CONTAINER = GpuNodeSpec("passthrough"), GpuNodeSpec("container")
AWAY, BACK = Want("container"), Want("passthrough")
VCUDA, T4_HALF = "tencent.com/vcuda-core", "nvidia.com/GRID_T4-8Q"
PROBE = "/sys/bus/pci/drivers_probe"

T4 = HostSpec(about="one T4 for vGPUs", slots=(SlotSpec(at=GPU, board="T4", group=GROUP, numa=0),))
TYPES = {"T4-8Q": {"T4-8Q": 2}, "T4-16Q": {"T4-16Q": 1}}
HALVES, WHOLE = GpuNodeSpec("vgpu", vgpu_config="T4-8Q"), GpuNodeSpec("vgpu", vgpu_config="T4-16Q")
BUILT_IN = NodeRequest(configs=Observed(None))
TO_WHOLE, TO_HALVES = Want("vgpu", "T4-16Q"), Want("vgpu", "T4-8Q")


def of_vgpus(*actors: tuple[Action, ...], first: tuple[Action, ...] = ()) -> Scenario:
    """Return a scenario of a T4 with two desired vGPUs."""
    return Scenario(T4, HALVES, actors, first=first, request=BUILT_IN, vgpus=TYPES)


def of_vfs(*actors: tuple[Action, ...], first: tuple[Action, ...] = ()) -> Scenario:
    """Return a scenario of an A10 whose VFs are enabled for vGPUs."""
    to_vgpus, types = Want("vgpu", "A10-12Q"), {"A10-12Q": {"A10-12Q": 2}}
    return Scenario(
        FEW_VFS, CONTAINER, ((to_vgpus,), *actors), first=first, request=BUILT_IN, vgpus=types, begin_s=33.0
    )


def of_shares(*actors: tuple[Action, ...]) -> Scenario:
    """Return a scenario of an A10 that pods share by halves."""
    settings = Settings(shares=ShareSettings(units=UNITS))
    return Scenario(NATIVE, GpuNodeSpec("shared"), actors, settings=settings, shares=True, begin_s=20.0)


RESTART = (Kill(), Start())
RESTARTED = (StopKubelet(), StartKubelet())
SHARER = (AdmitShare("sharer-p", 1), EndSharer("sharer-p"))
OVERLAP = (StartBeside(), EndOlder())

SCENARIOS: Mapping[str, Scenario] = {
    "return-or-admission": Scenario(ON_VFIO, PASSTHROUGH, ((Admit("vm"),), (AWAY,)), judges_desired=True),
    "return-and-back": Scenario(ON_VFIO, PASSTHROUGH, ((AWAY, BACK, AWAY), (Admit("vm"),)), judges_desired=True),
    "back-at-once": Scenario(ON_VFIO, PASSTHROUGH, ((AWAY, BACK),), judges_desired=True),
    "pod-ends": Scenario(ON_VFIO, PASSTHROUGH, ((StartVm("vm"), EndPod("vm")), (AWAY,)), first=(Admit("vm"),)),
    "two-pods-of-one-group": Scenario(IN_ONE_GROUP, PASSTHROUGH, ((Admit("vm-a"),), (Admit("vm-b"),), (AWAY,))),
    "return-of-a-group": Scenario(IN_ONE_GROUP, PASSTHROUGH, ((Admit("vm", NEXT),), (AWAY,))),
    "group-after-restart": Scenario(
        IN_ONE_GROUP, PASSTHROUGH, ((LoseLedger(), *RESTART, Admit("vm-b")),), first=(Admit("vm-a"),)
    ),
    "vm-by-hand": Scenario(ON_VFIO, PASSTHROUGH, ((AWAY,), (OpenGroup("qemu", GROUP), Close("qemu")))),
    "vm-by-hand-or-pod": Scenario(ON_VFIO, PASSTHROUGH, ((Admit("vm"),), (OpenGroup("qemu", GROUP), Close("qemu")))),
    "vm-about-to-start": Scenario(CDEVS, PASSTHROUGH, ((AWAY,), (OpenDevice("qemu", GPU), Close("qemu")))),
    "vm-about-to-start-before-the-lease": Scenario(
        CDEVS, PASSTHROUGH, ((AWAY,), (OpenDevice("qemu", GPU, before_lease=True), Close("qemu")))
    ),
    "rebound-by-hand": Scenario(ON_VFIO, PASSTHROUGH, ((Admit("vm"),), (Rebind(GPU, "nvidia"),))),
    "neighbour-rebound-by-hand": Scenario(IN_ONE_GROUP, PASSTHROUGH, ((Admit("vm"),), (Rebind(NEXT, "nvidia"),))),
    "container-is-taken": Scenario(NATIVE, CONTAINER, ((BACK,), (Open("job", GPU), Close("job")))),
    "pod-of-another-plugin": Scenario(
        NATIVE, CONTAINER, ((BACK,), (EndPod("cuda"),)), first=(AdmitOther("cuda", GPU),)
    ),
    "known-pod-of-another-plugin": Scenario(
        NATIVE,
        CONTAINER,
        ((BACK,), (StopKubelet(), StartKubelet()), (EndPod("cuda"),)),
        first=(AdmitOther("cuda", GPU),),
        begin_s=33.0,
    ),
    "pod-with-an-unknown-id": Scenario(
        NATIVE, CONTAINER, ((BACK,), (EndPod("mig"),)), first=(AdmitUnknown("mig", GPU),), begin_s=33.0
    ),
    "pods-of-another-plugin": Scenario(
        NATIVE,
        CONTAINER,
        ((BACK,), (AdmitOther("cuda-a", GPU), EndPod("cuda-a"), AdmitOther("cuda-b", GPU), EndPod("cuda-b"))),
        begin_s=33.0,
    ),
    "pods-of-an-unknown-plugin": Scenario(
        NATIVE,
        CONTAINER,
        ((BACK,), (AdmitUnknown("core-a", GPU, VCUDA), EndPod("core-a"), AdmitUnknown("core-b", GPU, VCUDA))),
        begin_s=33.0,
    ),
    "pods-of-kubevirts-plugin": Scenario(
        ON_VFIO,
        PASSTHROUGH,
        (
            (Admit("ours"), EndPod("ours")),
            (AdmitByGroup("theirs"), EndPod("theirs"), AdmitByGroup("theirs-too")),
            (AWAY,),
        ),
    ),
    "group-of-kubevirts-plugin": Scenario(
        IN_ONE_GROUP, PASSTHROUGH, ((Admit("ours"),), (AdmitByGroup("theirs"), EndPod("theirs")), RESTART)
    ),
    "vgpus-of-kubevirts-plugin": of_vgpus(
        (Admit("ours-a"), Admit("ours-b")), (AdmitByGroup("theirs", T4_HALF), EndPod("theirs")), (TO_WHOLE,)
    ),
    "slow-change": Scenario(
        NATIVE, CONTAINER, ((BACK,), (Want("container", after_s=80.0), AdmitOther("cuda", GPU, after_s=80.0)))
    ),
    "kubelet-restarts": Scenario(ON_VFIO, PASSTHROUGH, ((Admit("vm"),), (StopKubelet(), StartKubelet()), (AWAY,))),
    "clock-steps": Scenario(
        ON_VFIO,
        PASSTHROUGH,
        ((StartVm("vm"), EndPod("vm")), (AWAY,), (StepClock(7200.0), StepClock(-10800.0))),
        first=(Admit("vm"),),
    ),
    "account-is-lost": Scenario(ON_VFIO, PASSTHROUGH, ((Admit("vm"),), (LoseAccount(), MendAccount()), (AWAY,))),
    "checkpoint-is-deleted": Scenario(
        ON_VFIO, PASSTHROUGH, ((Admit("vm"), Admit("vm-b")), (DeleteCheckpoint(), *RESTARTED, RegisterOther()), (AWAY,))
    ),
    "checkpoint-of-another-plugin-is-deleted": Scenario(
        NATIVE,
        CONTAINER,
        ((BACK,), (EndPod("cuda"),), (DeleteCheckpoint(), *RESTARTED, RegisterOther())),
        first=(AdmitOther("cuda", GPU),),
    ),
    "checkpoint-is-deleted-while-the-agent-is-away": Scenario(
        NATIVE,
        CONTAINER,
        ((BACK,), (Kill(), DeleteCheckpoint(), *RESTARTED, RegisterOther(), Start())),
        first=(AdmitOther("cuda", GPU),),
        begin_s=33.0,
    ),
    "count-fails": Scenario(
        ON_VFIO, PASSTHROUGH, ((Silence(), Pause(40.0), Answer()), (AWAY,), (Admit("vm"),)), judges_count=True
    ),
    "killed": Scenario(ON_VFIO, PASSTHROUGH, ((Admit("vm"),), RESTART, (AWAY,))),
    "killed-without-ledger": Scenario(
        ON_VFIO, PASSTHROUGH, ((Kill(), LoseLedger(), Start()), (AWAY,)), first=(Admit("vm"),)
    ),
    "killed-without-ledger-or-api": Scenario(
        ON_VFIO,
        PASSTHROUGH,
        ((Kill(), LoseLedger(), StopKubelet(), Start(), StartKubelet()), (AWAY,)),
        first=(Admit("vm"),),
    ),
    "killed-during-a-change": Scenario(NATIVE, CONTAINER, ((BACK, AWAY), RESTART)),
    "rebooted": Scenario(ON_VFIO, PASSTHROUGH, ((Admit("vm"),), (AWAY,), (Reboot(), Start()))),
    "a-step-fails": Scenario(NATIVE, CONTAINER, ((BACK,), (Refuse(PROBE, errno.EIO), Pause(60.0), Mend()))),
    "a-step-fails-on-the-way-back": Scenario(
        ON_VFIO, PASSTHROUGH, ((AWAY,), (Refuse(PROBE, errno.EIO), Pause(60.0), Mend()))
    ),
    "driver-refuses": Scenario(NATIVE, CONTAINER, ((DriverRefuses("vfio-pci"), BACK, Pause(60.0), DriverAccepts()),)),
    "driver-refuses-for-good": Scenario(NATIVE, CONTAINER, ((DriverRefuses("vfio-pci"), BACK),)),
    "vgpus-or-admission": of_vgpus((Admit("vm"),), (TO_WHOLE,)),
    "vgpus-and-back": of_vgpus((TO_WHOLE, TO_HALVES), (Admit("vm"),)),
    "vgpus-in-use": of_vgpus((StartVm("vm"), EndPod("vm")), (TO_WHOLE,), first=(Admit("vm"),)),
    "vgpus-by-hand": of_vgpus((TO_WHOLE,), (OpenVgpu("qemu"), Close("qemu"))),
    "vfs-of-a-used-gpu": of_vfs((Open("job", GPU), Close("job"))),
    "vfs-of-a-pods-gpu": of_vfs((EndPod("cuda"),), first=(AdmitOther("cuda", GPU),)),
    "vgpus-killed": of_vgpus((Admit("vm"),), (Kill(), LoseLedger(), Start()), (TO_WHOLE,)),
    "vgpus-rebooted": of_vgpus((Reboot(), Start()), (Admit("vm"),)),
    "vgpus-to-passthrough": of_vgpus((Admit("vm"),), (BACK, TO_HALVES)),
    "command-or-admission": Scenario(
        ON_VFIO, GpuNodeSpec("unmanaged"), ((Admit("vm"),), (Command(GPU, DesiredDriver.NATIVE),))
    ),
    "command-or-admission-by-its-own-node": Scenario(
        CDEVS_ALONE, GpuNodeSpec("unmanaged"), ((Admit("vm"),), (Command(GPU, DesiredDriver.NATIVE),))
    ),
    "command-after-the-agent": Scenario(
        ON_VFIO, GpuNodeSpec("unmanaged"), ((Admit("vm"),), (Kill(), Command(GPU, DesiredDriver.NATIVE)))
    ),
    "command-and-pod": Scenario(
        ON_VFIO,
        GpuNodeSpec("unmanaged"),
        ((StartVm("vm"), EndPod("vm")), (Command(GPU, DesiredDriver.NATIVE),)),
        first=(Admit("vm"),),
        begin_s=33.0,
    ),
    "two-agents": Scenario(ON_VFIO, PASSTHROUGH, (OVERLAP, (Admit("vm"),), (AWAY,))),
    "two-agents-and-back": Scenario(ON_VFIO, PASSTHROUGH, ((StartBeside(),), (AWAY, BACK), (Admit("vm"),))),
    "two-agents-killed": Scenario(ON_VFIO, PASSTHROUGH, ((StartBeside(), *RESTART), (Admit("vm"),), (AWAY,))),
    "two-agents-of-a-group": Scenario(IN_ONE_GROUP, PASSTHROUGH, (OVERLAP, (Admit("vm-a"),), (Admit("vm-b"),))),
    "two-agents-of-vgpus": of_vgpus(OVERLAP, (Admit("vm"),), (TO_WHOLE,)),
    "memory-of-a-vm": Scenario(
        KEEPS_MEMORY,
        PASSTHROUGH,
        ((StartVm("vm"), EndPod("vm"), Admit("vm-b")), (AWAY, AdmitOther("cuda", GPU))),
        first=(Admit("vm"),),
        begin_s=33.0,
    ),
    "memory-of-a-vm-after-a-kill": Scenario(
        KEEPS_MEMORY, PASSTHROUGH, ((Admit("vm"), EndPod("vm"), Admit("vm-b")), (Kill(), LoseLedger(), Start()))
    ),
    "memory-of-a-container": Scenario(
        KEEPS_MEMORY_NATIVE,
        CONTAINER,
        ((EndPod("cuda"), BACK, Admit("vm")),),
        first=(AdmitOther("cuda", GPU),),
        begin_s=33.0,
    ),
    "memory-or-a-reboot": Scenario(
        KEEPS_MEMORY, PASSTHROUGH, ((Admit("vm"), EndPod("vm"), Admit("vm-b")), (Reboot(), Start()))
    ),
    "share-or-change": of_shares(SHARER, (BACK,)),
    "share-and-back": of_shares(SHARER, (BACK, Want("shared"))),
    "share-or-command": of_shares(SHARER, (Kill(), Command(GPU, DesiredDriver.PASSTHROUGH), Start())),
    "share-and-restart": of_shares(SHARER, (BACK,), RESTART),
    "share-of-a-deleted-pod": of_shares(
        (AdmitShare("sharer-p", 2), DeleteByForce("sharer-p"), AdmitShare("sharer-q", 2)),
        (EndSharer("sharer-p"),),
        RESTART,
    ),
    "deleted-sharer-or-change": of_shares(
        (AdmitShare("sharer-p", 2), DeleteByForce("sharer-p")), (EndSharer("sharer-p"),), (BACK,)
    ),
    "unplugged": Scenario(
        ON_VFIO,
        PASSTHROUGH,
        ((Admit("vm"), EndPod("vm")), (Unplug(GPU), PlugIn(GPU)), (StopKubelet(), StartKubelet()) * 2),
    ),
    **NATIVE_SCENARIOS,
    **GATE_SCENARIOS,
    **VENDOR_SCENARIOS,
    **INSTANCE_SCENARIOS,
    **COMMAND_SCENARIOS,
    **NEIGHBOUR_SCENARIOS,
    **ON_DEMAND_SCENARIOS,
    **REBOOT_SCENARIOS,
    **HOTPLUG_SCENARIOS,
    **CLAIM_SCENARIOS,
}
