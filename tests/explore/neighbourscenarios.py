"""Scenarios of other device plugins: of one that offers the vGPUs of `nvidia-k8s-vgpu-dm`, and of those that are slow.

The kubelet waits for another plugin's answer for the same container, without a deadline, before it records what
gpuvirt has allocated to it.
"""

from collections.abc import Mapping
from dataclasses import replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.explore.actions import (
    AdmitBeside,
    EndPod,
    Kill,
    LoseLedger,
    Pause,
    RegisterOther,
    Start,
    StartKubelet,
    StopKubelet,
    Want,
)
from tests.explore.command import Command
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


GPU = PciAddress("0000:65:00.0")
ON_VFIO = HostSpec(
    about="one A10 on vfio-pci", slots=(SlotSpec(at=GPU, board="A10", group=12, numa=0, driver="vfio-pci"),)
)
NEVER, LATE, LATER = AdmitBeside("vm"), AdmitBeside("vm", answers_after_s=25.0), Pause(30.0)
RESTART = (Kill(), Start())


def _slow(*actors: tuple[Action, ...], mode: str = "passthrough") -> Scenario:
    return Scenario(ON_VFIO, GpuNodeSpec(mode), actors)


NEIGHBOUR_SCENARIOS: Mapping[str, Scenario] = {
    "neighbour-or-admission": _of((TO_WHOLE,), (AdmitByNeighbour("vm"),)),
    "neighbour-and-back": _of((AdmitByNeighbour("vm"),), (TO_WHOLE, TO_HALVES)),
    "neighbour-in-use": _of((AdmitByNeighbour("vm"), StartVm("vm"), EndPod("vm")), (TO_WHOLE,)),
    "neighbour-by-hand": _of((OpenVgpu("qemu"), Close("qemu")), (TO_WHOLE,)),
    "neighbour-restarts": _of((TO_WHOLE,), (RestartNeighbour(), AdmitByNeighbour("vm"))),
    "neighbour-and-kubelet": _of((AdmitByNeighbour("vm"),), (StopKubelet(), StartKubelet()), (TO_WHOLE,)),
    "neighbour-killed": _of((AdmitByNeighbour("vm"),), (Kill(), LoseLedger(), Start()), (TO_WHOLE,)),
    "slow-neighbour": _slow((NEVER, LATER, Want("container"))),
    "slow-neighbour-and-disk": _slow((replace(NEVER, stops_writes=True), LATER, Want("container"))),
    "slow-neighbour-answers": _slow((LATE, EndPod("vm")), (LATER, Want("container"))),
    "slow-neighbour-and-restart": _slow((LATE,), (*RESTART, LATER, Want("container"))),
    "slow-neighbour-and-lost-ledger": _slow((NEVER,), (Kill(), LoseLedger(), Start(), LATER, Want("container"))),
    "slow-neighbour-and-kubelet": _slow(
        (NEVER,), (StopKubelet(), StartKubelet(), RegisterOther()), (Want("container"),)
    ),
    "slow-neighbour-of-vgpus": Scenario(
        T4,
        GpuNodeSpec("vgpu", vgpu_config="T4-8Q"),
        ((NEVER, LATER, TO_WHOLE),),
        request=NodeRequest(configs=Observed(None)),
        vgpus=TYPES,
    ),
    "slow-neighbour-or-command": _slow((NEVER,), (Kill(), LATER, Command(GPU, DesiredDriver.NATIVE)), mode="unmanaged"),
}
