"""Scenarios of `nvidia-k8s-vgpu-dm` beside the device plugin of another operator, which offers its vGPUs."""

from collections.abc import Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.explore.actions import EndPod, Kill, LoseLedger, Start, StartKubelet, StopKubelet, Want
from tests.explore.hostactions import Close, OpenVgpu, StartVm
from tests.explore.neighbourplugin import AdmitByNeighbour, RestartNeighbour
from tests.explore.scenario import Action, Program, Scenario

T4 = HostSpec(about="one T4 for vGPUs", slots=(SlotSpec(at=PciAddress("0000:65:00.0"), board="T4", group=12, numa=0),))
TYPES = {"T4-8Q": {"T4-8Q": 2}, "T4-16Q": {"T4-16Q": 1}}
TO_WHOLE, TO_HALVES = Want("vgpu", "T4-16Q"), Want("vgpu", "T4-8Q")


def _of(*actors: tuple[Action, ...], first: tuple[Action, ...] = ()) -> Scenario:
    return Scenario(
        T4,
        GpuNodeSpec("vgpu", vgpu_config="T4-8Q"),
        actors,
        first=first,
        settings=Settings(mode=DesiredMode.VGPU),
        request=NodeRequest(configs=Observed(None)),
        vgpus=TYPES,
        begin_s=40.0,
        program=Program.VGPUS_ONLY,
    )


NEIGHBOUR_SCENARIOS: Mapping[str, Scenario] = {
    "neighbour-or-admission": _of((TO_WHOLE,), (AdmitByNeighbour("vm"),)),
    "neighbour-and-back": _of((AdmitByNeighbour("vm"),), (TO_WHOLE, TO_HALVES)),
    "neighbour-in-use": _of((AdmitByNeighbour("vm"), StartVm("vm"), EndPod("vm")), (TO_WHOLE,)),
    "neighbour-by-hand": _of((OpenVgpu("qemu"), Close("qemu")), (TO_WHOLE,)),
    "neighbour-restarts": _of((TO_WHOLE,), (RestartNeighbour(), AdmitByNeighbour("vm"))),
    "neighbour-and-kubelet": _of((AdmitByNeighbour("vm"),), (StopKubelet(), StartKubelet()), (TO_WHOLE,)),
    "neighbour-killed": _of((AdmitByNeighbour("vm"),), (Kill(), LoseLedger(), Start()), (TO_WHOLE,)),
}
