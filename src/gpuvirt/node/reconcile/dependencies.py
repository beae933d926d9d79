"""What the reconciler of a node works from: what is known and desired, what pods have, and whom it tells."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuvirt.clock import Signal
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.vgpus.modes import Questions
from gpuvirt.model.desired.observed import Progress
from gpuvirt.node.change.attempts import ReportProblem
from gpuvirt.node.known.state import NodeState
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.reconcile.desiredunits import DesiredUnits
from gpuvirt.node.reconcile.operands import Operands
from gpuvirt.node.reconcile.podaccount import PodAccount


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the agent does when the reconciler calls."""

    changed: Callable[[tuple[str, ...], str], None]
    """Takes that a change has ended: of `passthrough` or `native` drivers, of `vgpus`, with its outcome."""
    conclude_soon: Callable[[], None]
    report_problem: ReportProblem


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The dependencies of one node's reconciler."""

    state: NodeState
    account: PodAccount
    desired: DesiredUnits
    operands: Operands | None
    """Another's programs that offer what is here; None where the agent itself does, which withdraws it."""
    callbacks: Callbacks
    concluded: Signal = field(default_factory=Signal)
    """Set whenever conclusions were drawn."""
    vgpu_states: Cell[Progress | None] = field(default_factory=lambda: Cell(None))
    """How far what is desired of vGPUs has been reached, for the cluster to be told; None: it is told nothing."""
    workload_states: Cell[Progress | None] = field(default_factory=lambda: Cell(None))
    """How far the drivers are that the cluster desires; None: nothing is said of that."""

    @property
    def questions(self) -> Mapping[PciAddress, tuple[DesiredVgpus, Questions]]:
        """What nvidia-smi must be asked of GPUs before it is known what is to be done to them."""
        return self.state.vgpu_plans.questions

    def plan_of(self, gpu: PciAddress) -> VgpuPlan:
        """Return what was to be done to the vGPUs of a GPU when it was last observed."""
        return self.state.vgpu_plans.plan_of(gpu)
