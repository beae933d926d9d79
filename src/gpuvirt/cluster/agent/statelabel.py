"""The node's labels with the progress of its vGPUs and GPUs, and the annotations with the reasons."""

from dataclasses import dataclass

from gpuvirt import plain
from gpuvirt.cluster.agent.nodekeys import Claim
from gpuvirt.cluster.keys import Keys
from gpuvirt.cluster.labels import REASON_ANNOTATION, STATE_LABEL, WORKLOAD_REASON_ANNOTATION, WORKLOAD_STATE_LABEL
from gpuvirt.model.desired.observed import Progress
from gpuvirt.node.loops.cell import Cell

MOST_REASON = 1000
"""The most characters of a reason; all annotations of an object together may have 256 KiB."""


@dataclass(frozen=True, slots=True)
class Names:
    """The label of a state, and the annotation with its reason."""

    label: str
    annotation: str


OF_VGPUS = Names(STATE_LABEL, REASON_ANNOTATION)
OF_WORKLOAD = Names(WORKLOAD_STATE_LABEL, WORKLOAD_REASON_ANNOTATION)


def state_keys(state: Progress | None, names: Names = OF_VGPUS) -> Keys:
    """Return the label and the annotation of a state; without a state, the node's stay as they are."""
    return Keys({names.label: state.name}, {names.annotation: _reason(state)}) if state is not None else Keys()


def state_claim(states: Cell[Progress | None], names: Names) -> Claim:
    """Return the claim of the label and the annotation of a state."""
    return Claim(lambda _: state_keys(states.get(), names), states.telling)


def _reason(state: Progress) -> str | None:
    return plain.one_line(state.reason, MOST_REASON) or None
