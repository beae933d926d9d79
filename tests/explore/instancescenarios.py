"""Scenarios of vGPUs on GPU instances (MIG), of vGPUs of several sizes, and of the VFs of one GPU at several pods."""

from collections.abc import Mapping

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.desired.observed import ConfigText, GpuNodeSpec, NodeRequest, Observed
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, shared_cards
from tests.explore.actions import Admit, AdmitUnknown, EndPod, Kill, Start, Want
from tests.explore.hostactions import Close, Open, OpenVgpu, StartVm
from tests.explore.scenario import Action, Scenario

GPU = PciAddress("0000:65:00.0")
CONFIGS = """
version: v1
vgpu-configs:
  small: [{devices: all, vgpu-devices: {A30-1-6C: 4}}]
  large: [{devices: all, vgpu-devices: {A30-2-12C: 2}}]
  equal: [{devices: all, vgpu-devices: {A10-12Q: 2}}]
  mixed: [{devices: all, vgpu-devices: {A10-12Q: 1, A10-6Q: 2}, sizes: mixed}]
"""
TYPES = {
    "small": {"A30-1-6C": 4},
    "large": {"A30-2-12C": 2},
    "equal": {"A10-12Q": 2},
    "mixed": {"A10-12Q": 1, "A10-6Q": 2},
}
TO_SMALL, TO_LARGE, TO_EQUAL, TO_MIXED, TO_CONTAINERS = (
    *(Want("vgpu", name) for name in ("small", "large", "equal", "mixed")),
    Want("container"),
)


def _with_vfs(board: str) -> HostSpec:
    card = msgspec.structs.replace(shared_cards()[board], total_vfs=4)
    return HostSpec(
        about=f"one {board} on nvidia, which makes vGPUs on four VFs",
        boards={f"{board} of four": card},
        slots=(SlotSpec(at=GPU, board=f"{board} of four", group=12, numa=0),),
    )


def _of(board: str, config: str, *actors: tuple[Action, ...], first: tuple[Action, ...] = ()) -> Scenario:
    request = NodeRequest(configs=Observed(ConfigText(CONFIGS, "configs")))
    spec = GpuNodeSpec("vgpu", vgpu_config=config)
    return Scenario(_with_vfs(board), spec, actors, first=first, request=request, vgpus=TYPES, begin_s=60.0)


RESTART = (Kill(), Start())

INSTANCE_SCENARIOS: Mapping[str, Scenario] = {
    "instances-or-admission": _of("A30", "small", (Admit("vm"),), (TO_LARGE,)),
    "instances-and-back": _of("A30", "large", (TO_SMALL, TO_LARGE), (Admit("vm"),)),
    "instances-in-use": _of("A30", "small", (StartVm("vm"), EndPod("vm")), (TO_LARGE,), first=(Admit("vm"),)),
    "instances-by-hand": _of("A30", "small", (TO_LARGE,), (OpenVgpu("qemu"), Close("qemu"))),
    "instances-of-a-used-gpu": _of("A30", "small", (TO_LARGE,), (Open("job", GPU), Close("job"))),
    "instances-of-another-plugin": _of("A30", "small", (TO_LARGE,), (AdmitUnknown("mig", GPU), EndPod("mig"))),
    "instances-killed": _of("A30", "small", (Admit("vm"),), RESTART, (TO_LARGE,)),
    "sizes-or-admission": _of("A10", "equal", (Admit("vm"),), (TO_MIXED,)),
    "sizes-in-use": _of("A10", "mixed", (StartVm("vm"), EndPod("vm")), (TO_EQUAL,), first=(Admit("vm"),)),
    "sizes-of-a-used-gpu": _of("A10", "equal", (TO_MIXED,), (Open("job", GPU), Close("job"))),
    "vfs-at-two-pods": _of(
        "A10", "equal", (Admit("vm-a"), Admit("vm-b")), (EndPod("vm-a"), EndPod("vm-b")), (TO_MIXED,)
    ),
    "vfs-at-two-pods-or-containers": _of(
        "A10", "equal", (Admit("vm-b"), StartVm("vm-b")), (EndPod("vm-a"),), (TO_CONTAINERS,), first=(Admit("vm-a"),)
    ),
}
