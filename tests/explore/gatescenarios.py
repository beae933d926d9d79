"""Scenarios of gates: an unprivileged device plugin beside commands, older programs, and files that fail."""

import errno
from collections.abc import Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.desired.observed import GpuNodeSpec
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.explore.actions import Admit, EndOlder, EndPod, Kill, Start, StartBeside, Want
from tests.explore.command import Command
from tests.explore.diskactions import FailFiles, MendFiles, Place
from tests.explore.hostactions import StartVm
from tests.explore.scenario import Action, Program, Scenario

GPU, NEXT = PciAddress("0000:65:00.0"), PciAddress("0000:66:00.0")
ON_VFIO = HostSpec(
    about="one A10 on vfio-pci", slots=(SlotSpec(at=GPU, board="A10", group=12, numa=0, driver="vfio-pci"),)
)
IN_ONE_GROUP = HostSpec(
    about="two A10 in one IOMMU group",
    slots=tuple(SlotSpec(at=gpu, board="A10", group=12, numa=0, driver="vfio-pci") for gpu in (GPU, NEXT)),
)
UNMANAGED, PASSTHROUGH = GpuNodeSpec("unmanaged"), GpuNodeSpec("passthrough")
AWAY = Want("container")
UNBIND = Command(GPU, DesiredDriver.NATIVE)


def beside(
    program: Program, *actors: tuple[Action, ...], first: tuple[Action, ...] = (), begin_s: float = 3.0
) -> Scenario:
    """Return a scenario of a GPU on vfio-pci that a program offers and a command changes."""
    return Scenario(ON_VFIO, UNMANAGED, actors, first=first, program=program, begin_s=begin_s)


PLUGIN, OLDER_PLUGIN = Program.PLUGIN_ONLY, Program.WITHOUT_GATES

GATE_SCENARIOS: Mapping[str, Scenario] = {
    "plugin-or-command": beside(PLUGIN, (Admit("vm"),), (UNBIND,)),
    "plugin-and-two-commands": beside(PLUGIN, (Admit("vm"),), (UNBIND, Command(GPU, DesiredDriver.PASSTHROUGH))),
    "plugin-killed-or-command": beside(PLUGIN, (Admit("vm"),), (Kill(), UNBIND), (Start(),)),
    "plugin-and-pod-or-command": beside(
        PLUGIN, (StartVm("vm"), EndPod("vm")), (UNBIND,), first=(Admit("vm"),), begin_s=33.0
    ),
    "plugin-of-a-group-or-command": Scenario(
        IN_ONE_GROUP, UNMANAGED, ((Admit("vm", NEXT),), (UNBIND,)), program=PLUGIN
    ),
    "older-plugin-or-command": beside(OLDER_PLUGIN, (Admit("vm"),), (UNBIND,)),
    "older-plugin-killed-or-command": beside(OLDER_PLUGIN, (Admit("vm"),), (Kill(), UNBIND), (Start(),)),
    "two-agents-or-command": beside(Program.NODE, (StartBeside(), EndOlder()), (Admit("vm"),), (UNBIND,)),
    **{
        f"command-or-admission-with-{errno.errorcode[number]}-of-{place.value}": beside(
            Program.NODE, (FailFiles(place, number), MendFiles(30.0)), (Admit("vm"),), (UNBIND,)
        )
        for place, number in (
            (Place.GATES, errno.EMFILE),
            (Place.GATES, errno.ENOSPC),
            (Place.GATES, errno.EROFS),
            (Place.STATE, errno.ENOSPC),
        )
    },
    **{
        f"return-with-ENOSPC-of-{place.value}": Scenario(
            ON_VFIO, PASSTHROUGH, ((FailFiles(place, errno.ENOSPC), MendFiles(60.0)), (Admit("vm"),), (AWAY,))
        )
        for place in Place
    },
    "plugin-or-command-with-EMFILE": beside(
        PLUGIN, (FailFiles(Place.GATES, errno.EMFILE), MendFiles(30.0)), (Admit("vm"),), (UNBIND,)
    ),
    "plugin-or-command-with-ENOSPC": beside(
        PLUGIN, (FailFiles(Place.GATES, errno.ENOSPC), MendFiles(30.0)), (Admit("vm"),), (UNBIND,)
    ),
}
