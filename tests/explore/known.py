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
        "pod-of-another-plugin:-0.0,2.0,2.1",
        "The kubelet's account may be as old as its interval (15 s) when a GPU is unbound from its native driver:"
        " `Oversight.pods` asks for a newer one only where something is withdrawn. A pod that NVIDIA's plugin has given"
        " the GPU since, and that has not opened it yet, loses it.",
    ),
    "no-driver-forgotten": Known(
        "a-step-fails",
        "unexplained",
        "a-step-fails:-1.1,1.2,2.0",
        "A GPU that was on vfio-pci before gpuvirt first saw it is in no record of original drivers. Where the probe"
        " for its native driver fails, it has no driver, `wanted.unmet` takes that for what is desired, and the reason"
        " is taken away.",
    ),
}


def is_known(scenario: str, kind: str) -> bool:
    """Return whether a violation in a scenario is one of these."""
    return any(one.scenario == scenario and one.kind == kind for one in KNOWN.values())
