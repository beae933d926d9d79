"""Scenarios of vGPUs by vendor VFIO: an L40S whose two vGPUs become one, on VFs that stay on NVIDIA's driver."""

from collections.abc import Mapping

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, shared_cards
from tests.explore.actions import Admit, EndPod, Want
from tests.explore.hostactions import Close, Open, StartVm
from tests.explore.scenario import Action, Scenario

GPU = PciAddress("0000:65:00.0")
HOST = HostSpec(
    about="one L40S on nvidia, with vGPUs of vendor VFIO on four VFs",
    boards={"L40S of four": msgspec.structs.replace(shared_cards()["L40S"], total_vfs=4)},
    slots=(SlotSpec(at=GPU, board="L40S of four", group=12, numa=0),),
)


def _beside(*actors: tuple[Action, ...]) -> Scenario:
    types = {"L40S-24Q": {"L40S-24Q": 2}, "L40S-48Q": {"L40S-48Q": 1}}
    spec, to_one = GpuNodeSpec("vgpu", vgpu_config="L40S-24Q"), (Want("vgpu", "L40S-48Q"),)
    return Scenario(
        HOST, spec, (to_one, *actors), request=NodeRequest(configs=Observed(None)), vgpus=types, begin_s=33.0
    )


VENDOR_SCENARIOS: Mapping[str, Scenario] = {
    "vendor-vfio-or-admission": _beside((Admit("vm"),)),
    "vendor-vfio-in-use": _beside((Admit("vm"), StartVm("vm"), EndPod("vm"))),
    "vendor-vfio-of-a-used-gpu": _beside((Open("job", GPU), Close("job"))),
}
