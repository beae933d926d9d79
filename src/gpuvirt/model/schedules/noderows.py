"""What `gpuvirt schedule show` prints of the nodes whose vGPU config follows a schedule."""

from dataclasses import dataclass

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason
from gpuvirt.model.schedules.spec import PhaseName
from gpuvirt.model.schedules.status import Status


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node that has a vGPU config by the phase of now, as the status has it."""

    node: NodeName
    phase: PhaseName
    vgpu_config: str
    applied: bool
    reason: Reason | None
    """Why it is not applied."""


def node_rows(status: Status) -> tuple[NodeRow, ...]:
    """Return the nodes with vGPU configs of a status."""
    return tuple(
        NodeRow(node.node, node.phase, node.vgpu_config, node.is_applied, node.reason) for node in status.nodes
    )
