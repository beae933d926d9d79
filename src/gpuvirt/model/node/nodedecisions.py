"""The decisions for one node at one moment, and when they differ without a new observation."""

import msgspec

from gpuvirt.model.allocation.nodeledger import OfferedNames
from gpuvirt.model.change.invalidstates import InvalidStates
from gpuvirt.model.node.desiredunits import DesiredUnits
from gpuvirt.model.node.picture import NodeMemory
from gpuvirt.model.offers.givenshares import NO_TIME
from gpuvirt.model.offers.view import NodeView


class NodeDecisions(msgspec.Struct, frozen=True):
    """The decisions for one node at one moment."""

    view: NodeView = msgspec.field(default_factory=lambda: NodeView(NO_TIME, host_observed=False))
    """The view of the node, from which all output is made."""
    desired: DesiredUnits = msgspec.field(default_factory=DesiredUnits)
    """The desired state of each GPU with the plans toward it, and the questions for nvidia-smi."""
    invalid: InvalidStates = msgspec.field(default_factory=InvalidStates)
    """The invalid parts of the desired state."""
    names: OfferedNames | None = None
    """The names to keep in the ledger; None before the first observation of the host."""
    memory: NodeMemory = msgspec.field(default_factory=NodeMemory)
    """The results of these decisions that the next ones need."""

    @property
    def again_at_s(self) -> float | None:
        """When decisions differ without a new observation; None: never."""
        memory = self.memory
        times = (memory.notice.again_at_s, memory.review.again_at_s, memory.on_demand.replacements.again_at_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    @property
    def judged_again_at_s(self) -> float | None:
        """When the health of a device may differ at the next observation of the host; None: never."""
        times = (self.memory.offers.verdict.again_at_s, self.memory.sharing.verdict.again_at_s)
        return min((at_s for at_s in times if at_s is not None), default=None)
