"""Scenarios of GPUs that leave the host while pods have them, with and without a uevent that says so."""

from collections.abc import Mapping

from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.desired.observed import GpuNodeSpec
from gpuvirt.model.desired.settings import Settings, ShareSettings
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.explore.actions import (
    Admit,
    AdmitOther,
    AdmitShare,
    EndPod,
    EndSharer,
    Kill,
    RegisterOther,
    Start,
    StartKubelet,
    StopKubelet,
    Want,
)
from tests.explore.hostactions import Close, Open, PlugIn, Unplug
from tests.explore.hotplugactions import LoseUevents, UnplugUsed
from tests.explore.intervals import INTERVALS
from tests.explore.observer import UNITS
from tests.explore.scenario import Action, Scenario

GPU, NEXT = PciAddress("0000:65:00.0"), PciAddress("0000:66:00.0")
NATIVE = HostSpec(about="one A10 on nvidia", slots=(SlotSpec(at=GPU, board="A10", group=12, numa=0),))
TWO_NATIVE = HostSpec(
    about="two A10 on nvidia",
    slots=(SlotSpec(at=GPU, board="A10", group=12, numa=0), SlotSpec(at=NEXT, board="A10", group=13, numa=0)),
)
ON_VFIO = HostSpec(
    about="one A10 on vfio-pci", slots=(SlotSpec(at=GPU, board="A10", group=12, numa=0, driver="vfio-pci"),)
)
CONTAINER, PASSTHROUGH = GpuNodeSpec("container"), GpuNodeSpec("passthrough")
BACK = Want("passthrough")

SCANS_OFTEN = replace(INTERVALS, brief_s=9.0)
"""The agent's own interval of brief scans, which alone show what no uevent reports."""
REPLUG = (UnplugUsed(GPU), PlugIn(GPU))
UNSEEN = (LoseUevents(), *REPLUG)
RESTARTED = (StopKubelet(), StartKubelet())
SHARER = (AdmitShare("sharer-p", 1), EndSharer("sharer-p"))


def of_containers(*actors: tuple[Action, ...], host: HostSpec = NATIVE) -> Scenario:
    """Return a scenario of a container to which NVIDIA's plugin has given a GPU by its UUID, as the agent knows."""
    return Scenario(host, CONTAINER, actors, first=(AdmitOther("cuda", GPU),), begin_s=33.0, intervals=SCANS_OFTEN)


def of_shares(*actors: tuple[Action, ...]) -> Scenario:
    """Return a scenario of an A10 that pods share by halves."""
    settings, spec = Settings(shares=ShareSettings(units=UNITS)), GpuNodeSpec("shared")
    return Scenario(NATIVE, spec, actors, settings=settings, shares=True, begin_s=20.0, intervals=SCANS_OFTEN)


HOTPLUG_SCENARIOS: Mapping[str, Scenario] = {
    "used-gpu-is-unplugged": of_containers(REPLUG, (EndPod("cuda"),), (BACK,)),
    "used-gpu-is-unplugged-unseen": of_containers(UNSEEN, (RegisterOther(), EndPod("cuda"))),
    "used-gpu-is-unplugged-beside-a-change": of_containers(UNSEEN, (BACK,), (RegisterOther(),), host=TWO_NATIVE),
    "used-gpu-is-unplugged-and-killed": of_containers(UNSEEN, (Kill(), Start()), (BACK,)),
    "used-gpu-is-unplugged-without-a-kubelet": of_containers(UNSEEN, RESTARTED, (EndPod("cuda"),)),
    "open-gpu-is-unplugged": of_containers(UNSEEN, (Open("job", GPU), Close("job")), (BACK,)),
    "free-gpu-is-unplugged-unseen": Scenario(
        ON_VFIO,
        PASSTHROUGH,
        ((Admit("vm"), EndPod("vm")), (LoseUevents(), Unplug(GPU), PlugIn(GPU)), RESTARTED),
        intervals=SCANS_OFTEN,
    ),
    "shared-gpu-is-unplugged": of_shares(REPLUG, SHARER, (BACK,)),
    "shared-gpu-is-unplugged-unseen": of_shares(UNSEEN, SHARER, (RegisterOther(),)),
    "shared-gpu-is-unplugged-and-killed": of_shares(UNSEEN, SHARER, (Kill(), Start())),
}
