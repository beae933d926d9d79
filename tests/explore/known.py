"""What exploration has found in the shipped code and is not mended yet, each with the schedule that shows it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """One finding."""

    scenario: str
    kind: str
    """Which invariant is violated: other violations of the scenario are findings of their own."""
    seed: str
    """The smallest schedule that shows it."""
    why: str
    """What is wrong, and where."""


KNOWN: Mapping[str, Known] = {
    "stale-account": Known(
        "pod-of-another-plugin",
        "harm",
        "pod-of-another-plugin:-1.0",
        "The kubelet's account may be as old as its interval (15 s) when a GPU is unbound from its native driver:"
        " `Oversight.pods` asks for a newer one only where something is withdrawn. A pod that NVIDIA's plugin has given"
        " the GPU since, and that has not opened it yet, loses it.",
    ),
    "no-driver-forgotten": Known(
        "a-step-fails-on-the-way-back",
        "stuck",
        "a-step-fails-on-the-way-back:0.1:-1.1",
        "A GPU that was on vfio-pci before gpuvirt first saw it is in no record of original drivers. Where the probe"
        " for its native driver fails, it has no driver, `wanted.unmet` takes that for what is desired, no attempt"
        " follows, and the reason is taken away.",
    ),
    "change-left-half-way": Known(
        "killed-during-a-change",
        "left over",
        "killed-during-a-change:17.1",
        "An agent that is killed between NVIDIA's unbindLock and the unbind leaves the lock at 1, and two steps later"
        " the driver_override, too. Where the GPU is to stay with its native driver then, `wanted.unmet` sees nothing"
        " to do: nobody writes 0, so that no process can open the GPU, and nobody clears the override.",
    ),
    "command-beside-the-agent": Known(
        "command-or-admission",
        "harm",
        "command-or-admission:2.2",
        "`gpuvirt vfio unbind` reads the accounts, and then unbinds; the agent does not know of it and gives the device"
        " to a pod in between. Agent and command share the lock of the unit, which Allocate does not ask.",
    ),
    "cdev-opened-after-the-walk": Known(
        "vm-about-to-start",
        "harm",
        "vm-about-to-start:32.1:-1.1",
        "A VM that was started without the kubelet opens a device's own node after the walk through all processes, and"
        " has not bound it yet: no lease keeps it from that, and the unbind then waits until it closes the node. The"
        " kernel has nothing that would close this gap; a VM of a pod can't come into it.",
    ),
}


def is_known(scenario: str, kind: str) -> bool:
    """Return whether a violation in a scenario is one of these."""
    return any(one.scenario == scenario and one.kind == kind for one in KNOWN.values())
