"""Scenarios of GPUs that processes use through native drivers other than NVIDIA's, and of their sibling functions."""

from collections.abc import Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.desired.observed import GpuNodeSpec
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.explore.actions import Want
from tests.explore.hostactions import Close, Open
from tests.explore.scenario import Action, Scenario

GPU, AUDIO, USB, USB_C = (PciAddress(f"0000:65:00.{number}") for number in range(4))
NEXT = PciAddress("0000:66:00.0")
GROUP = 12
AMDGPU = HostSpec(
    about="one Radeon PRO W7900 with audio on native drivers", slots=(SlotSpec(at=GPU, board="W7900", group=GROUP),)
)
XE = HostSpec(about="one Flex 170 on xe", slots=(SlotSpec(at=GPU, board="Flex170", group=GROUP),))
TURING = HostSpec(
    about="one RTX 2060 with audio, USB and USB-C on native drivers",
    slots=(SlotSpec(at=GPU, board="RTX2060", group=GROUP),),
)
AMDGPUS_OF_A_GROUP = HostSpec(
    about="two Radeon PRO W7900 in one IOMMU group",
    slots=(SlotSpec(at=GPU, board="W7900", group=GROUP), SlotSpec(at=NEXT, board="W7900", group=GROUP)),
)
CONTAINER, PASSTHROUGH = GpuNodeSpec("container"), GpuNodeSpec("passthrough")
TAKEN, AWAY = (Want("passthrough"),), (Want("container"),)


def used_by(*opened: Open, host: HostSpec, then: tuple[Action, ...] = ()) -> Scenario:
    """Return a scenario of a native host whose GPUs are taken for VMs while processes open nodes."""
    users = tuple((opening, Close(opening.name)) for opening in opened)
    return Scenario(host, CONTAINER, ((*TAKEN, *then), *users))


NATIVE_SCENARIOS: Mapping[str, Scenario] = {
    "amdgpu-is-taken": used_by(Open("job", GPU), host=AMDGPU),
    "amdgpu-is-taken-and-given-back": used_by(Open("job", GPU), host=AMDGPU, then=AWAY),
    "amdgpu-beside-its-audio": used_by(Open("player", AUDIO, command="wireplumber"), host=AMDGPU),
    "amdgpu-of-a-monitored-gpu": used_by(Open("exporter", GPU, command="dcgm-exporter"), host=AMDGPU),
    "xe-is-taken": used_by(Open("job", GPU), host=XE),
    "nvidia-beside-its-audio": used_by(Open("player", AUDIO, command="wireplumber"), host=TURING),
    "nvidia-beside-its-usb": used_by(Open("reader", USB, command="pcscd"), host=TURING),
    "nvidia-beside-its-usb-c": used_by(Open("monitor", USB_C, command="ddcutil"), host=TURING),
    "group-of-two-natives": used_by(Open("job", GPU), Open("other", NEXT), host=AMDGPUS_OF_A_GROUP),
}
