"""Findings of the exploration that are not fixed yet, each with a schedule that reproduces it."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.explore.seeds import WHOLE


@dataclass(frozen=True)
class Known:
    """One finding."""

    scenario: str
    kind: str
    """The violated invariant; other violations of the scenario are separate findings."""
    seed: str
    """The smallest schedule that reproduces the finding."""
    why: str
    """The fault and its place in the code."""


KNOWN: Mapping[str, Known] = {
    "cdev-opened-after-the-walk": Known(
        "vm-about-to-start",
        "harm",
        "vm-about-to-start:30.1:-1.1",
        "A VM that was started without the kubelet opens a device's own node after the walk through all processes, and"
        " has not bound it yet: no lease keeps it from that, and the unbind then waits until it closes the node. The"
        " kernel has nothing that would close this gap; a VM of a pod can't come into it.",
    ),
    "admitted-between-proof-and-unbind": Known(
        "pods-of-kubevirts-plugin",
        "stuck",
        "pods-of-kubevirts-plugin:114.1:-1.2",
        "A pod of KubeVirt's own plugin gets the GPU between the proof and the unbind, and ends without having used it."
        " The GPU has no driver then, so how it can be reset is not read: a read of `reset_method` may sleep while an"
        " unbind does. The GPU is withheld (NoReset) until a reboot, or `vfio unbind --without-reset`.",
    ),
}


def is_known(scenario: str, kind: str) -> bool:
    """Return whether a violation in a scenario is a known finding."""
    return any(finding.scenario == scenario.removesuffix(WHOLE) and finding.kind == kind for finding in KNOWN.values())
