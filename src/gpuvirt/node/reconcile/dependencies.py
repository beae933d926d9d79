"""The dependencies of a node's reconciler: the agent's state, the desired units, the pods' devices, the callbacks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuvirt.clock import Signal
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.vgpus.modes import Questions
from gpuvirt.model.desired.observed import Progress
from gpuvirt.model.node.desiredunits import DesiredUnits
from gpuvirt.node.change.attempts import ReportProblem
from gpuvirt.node.known.state import NodeState
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.reconcile.operands import Operands
from gpuvirt.node.reconcile.podaccount import PodAccount


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The functions of the agent that the reconciler calls."""

    changed: Callable[[tuple[str, ...], str], None]
    """Called when a change ends: with `passthrough`, `native` or `vgpus`, and the outcome."""
    conclude_soon: Callable[[], None]
    report_problem: ReportProblem


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The dependencies of one node's reconciler."""

    state: NodeState
    account: PodAccount
    operands: Operands | None
    """The device plugin of another project that offers this node's devices; None if the agent offers them itself."""
    callbacks: Callbacks
    concluded: Signal = field(default_factory=Signal)
    """Set whenever the agent has drawn conclusions."""
    vgpu_states: Cell[Progress | None] = field(default_factory=lambda: Cell(None))
    """The progress of the desired vGPUs, as reported to the cluster; None: not reported."""
    workload_states: Cell[Progress | None] = field(default_factory=lambda: Cell(None))
    """The progress of the desired drivers, as reported to the cluster; None: not reported."""

    @property
    def desired(self) -> DesiredUnits:
        """The desired state of the isolation units, as last decided."""
        return self.state.decisions.desired

    @property
    def questions(self) -> Mapping[PciAddress, tuple[DesiredVgpus, Questions]]:
        """The questions for nvidia-smi that must be answered before GPUs can be planned."""
        return self.desired.vgpus.questions

    def plan_of(self, gpu: PciAddress) -> VgpuPlan:
        """Return the plan for the vGPUs of a GPU, as observed last."""
        return self.desired.vgpus.plan_of(gpu)
