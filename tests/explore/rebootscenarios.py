"""Scenarios of pods that had their devices before a reboot, whose containers the kubelet starts again."""

from collections.abc import Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.allocation import containerstarts
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.offers import offermaking
from gpuvirt.model.reasons import Reason
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.explore.actions import Admit, Start, Want
from tests.explore.guard import Guard, never, nothing
from tests.explore.hostactions import Reboot
from tests.explore.scenario import Scenario

GPU, NEXT = PciAddress("0000:65:00.0"), PciAddress("0000:66:00.0")
TWO = HostSpec(
    about="two A10 on nvidia, which are numbered as VFIO devices in the order in which they are bound",
    iommufd=True,
    slots=(
        SlotSpec(at=GPU, board="A10", group=12, numa=0),
        SlotSpec(at=NEXT, board="A10", group=13, numa=0),
    ),
)
T4 = HostSpec(about="one T4 for vGPUs", slots=(SlotSpec(at=GPU, board="T4", group=12, numa=0),))
REBOOTED = (Reboot(), Start())
REBOOT_SCENARIOS: Mapping[str, Scenario] = {
    "rebooted-pods-of-whole-gpus": Scenario(
        TWO, GpuNodeSpec("passthrough"), ((Admit("vm-a", GPU), Admit("vm-b", NEXT), *REBOOTED),)
    ),
    "rebooted-gpus-in-another-order": Scenario(
        TWO,
        GpuNodeSpec("passthrough", gpus={GPU: "container"}),
        ((Want("passthrough"), Admit("vm-a", GPU), Admit("vm-b", NEXT), *REBOOTED),),
    ),
    "rebooted-pods-of-vgpus": Scenario(
        T4,
        GpuNodeSpec("vgpu", vgpu_config="T4-8Q"),
        ((Admit("vm-a"), Admit("vm-b"), *REBOOTED),),
        request=NodeRequest(configs=Observed(None)),
        vgpus={"T4-8Q": {"T4-8Q": 2}},
    ),
}


def _against(_: Entry, against: Reason) -> Reason:
    return against


REBOOT_GUARDS: Mapping[str, Guard] = {
    "reboot: a pod's device is listed as healthy until it is there": Guard(
        offermaking, "awaited", _against, ("rebooted-pods-of-whole-gpus",)
    ),
    "reboot: the GPU of a pod that waits for it is bound for VMs": Guard(
        containerstarts, "_waits", never, ("rebooted-pods-of-whole-gpus",)
    ),
    "reboot: a container starts only once its devices are there": Guard(
        containerstarts,
        "_why_awaited",
        nothing,
        ("rebooted-pods-of-whole-gpus",),
        beside=(Guard(containerstarts, "foreign_nodes", nothing, ()),),
    ),
    "reboot: a container starts only with its devices' own nodes": Guard(
        containerstarts, "foreign_nodes", nothing, ("rebooted-gpus-in-another-order",)
    ),
}
