"""The phases of a node by its labels, each with the vGPU type that a profile gives its VM."""

from collections.abc import Iterable, Mapping

from gpuvirt.kube.kinds.vgpuschedule import PhaseSpec
from gpuvirt.model.workers.spec import PhaseName

PhaseTypes = Mapping[PhaseName, str | None]
"""The phases of a node, each with the vGPU type of its profile; None where no profile selects the node."""


def types_of(phases: Iterable[PhaseSpec], labels: Mapping[str, str]) -> PhaseTypes:
    """Return the phases whose workers a node is one of, by its labels."""
    return {PhaseName(phase.name): type_of(phase, labels) for phase in phases if phase.has_worker(labels)}


def type_of(phase: PhaseSpec, labels: Mapping[str, str]) -> str | None:
    """Return the vGPU type that the first profile of a phase that selects a node gives its VM."""
    return next((profile.vgpu_type for profile in phase.profiles if profile.workers.matches(labels)), None)
