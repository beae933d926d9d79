"""The node's label that says how far its vGPUs have come, and the annotation that says why."""

from gpuvirt.cluster.agent.names import REASON_ANNOTATION, STATE_LABEL
from gpuvirt.cluster.agent.nodekeys import Claim, Keys
from gpuvirt.model.heard import VgpuState
from gpuvirt.node.cell import Cell

MOST_REASON = 1000
"""Characters of a reason; all annotations of an object together have 256 KiB."""


def state_keys(state: VgpuState | None) -> Keys:
    """Return what a node is to say of a state; with None, whatever it says."""
    return Keys({STATE_LABEL: state.name}, {REASON_ANNOTATION: _reason(state)}) if state is not None else Keys()


def state_claim(states: Cell[VgpuState | None]) -> Claim:
    """Return the claim that the node says how far its vGPUs have come."""
    return Claim(lambda _: state_keys(states.get()), states.telling)


def _reason(state: VgpuState) -> str | None:
    text = " ".join(state.reason.split())
    return (text if len(text) <= MOST_REASON else f"{text[:MOST_REASON]}...") or None
