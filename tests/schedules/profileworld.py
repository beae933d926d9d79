"""A world whose phases give workers other vGPU types: one grows in the evening, one shrinks, and a third joins them."""

from typing_extensions import override

from gpuvirt.model.workers.hypervisor import Action, Call, Power
from gpuvirt.model.workers.spec import Phase, PhaseName, WorkerProfile
from gpuvirt_schedules.decide.nextstep import MarkNode
from gpuvirt_schedules.decide.times import timeline_of
from gpuvirt_sim.schedules.cluster import PHASE_LABEL
from tests.schedules.choices import Choices
from tests.schedules.modelcluster import NodeObject
from tests.schedules.modelhypervisor import Connection
from tests.schedules.world import DAY, NIGHT, World, worker

TYPES = {
    1: {DAY: "grid-4q", NIGHT: "grid-8q"},
    2: {DAY: "grid-12q", NIGHT: "grid-4q"},
    3: {NIGHT: "grid-4q"},
}
"""The types of each worker; all of a phase fill the GPU."""


class ProfileWorld(World):
    """The world of one run."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        for number, types in TYPES.items():
            node = self.cluster.nodes[worker(number, set()).name]
            self.hypervisor.vms[node.vm].set_type(types.get(DAY, types[NIGHT]))

    @override
    def phases(self, day: str) -> tuple[Phase, ...]:
        """Return the phases with their profiles."""
        found = super().phases(day)
        return tuple(Phase(phase.name, phase.start, _profiles(phase.name)) for phase in found)

    @override
    def workers(self) -> list[tuple[NodeObject, int]]:
        """Return the workers' nodes, with the labels of the day."""
        found = []
        for number, types in TYPES.items():
            node = worker(number, types.keys())
            node.types = types
            node.labels = {PHASE_LABEL: DAY if DAY in types else NIGHT}
            found.append((node, 0))
        return found

    @override
    def judge_type(self, node: NodeObject, call: Call, sender: Connection) -> None:
        """Judge a change of a vGPU type."""
        vm = self.hypervisor.vms[call.vm]
        if vm.by_hand_s >= sender.last_read_s - 1.0:
            return
        if vm.power is not Power.OFF or vm.becomes is not None:
            self.violate(f"the type of a VM that is not off is changed: {call} {vm}")
        if call.vgpu_type != node.types.get(self._phase):
            self.violate(f"a type of another phase: {call}")

    @override
    def judge_start(self, node: NodeObject, call: Call, sender: Connection) -> None:
        """Judge a start: no other VM on the GPU has the type of another phase."""
        phase, vm = self._phase, self.hypervisor.vms[call.vm]
        if vm.vgpu_type != node.types.get(phase) and node.opened_s < sender.last_read_s - 1.0:
            self.violate(f"started with the type of another phase: {call} {vm}")
        for other in self.cluster.nodes.values():
            vm = self.hypervisor.vms[other.vm]
            is_other = bool(other.phases) and other.exists and vm.vgpu_type != other.types.get(phase)
            if is_other and vm.has_gpu and max(vm.by_hand_s, other.opened_s) < sender.last_read_s - 1.0:
                self.violate(f"two phases on one GPU: {call} while {vm.name} has {vm.vgpu_type}")

    @override
    def judge_leave(self, node: NodeObject, call: Call) -> None:
        """Judge the end of a VM: one that has to get another type is never suspended."""
        super().judge_leave(node, call)
        if call.action is Action.SUSPEND and len(node.types) > 1:
            self.violate(f"suspended with the type of a phase: {call}")

    @override
    def judge_mark(self, node: NodeObject, action: MarkNode) -> None:
        """Judge an uncordon: pods then choose the node by its labels."""
        super().judge_mark(node, action)
        labels = {**node.labels, **dict(action.labels)}
        vm = self.hypervisor.vms[node.vm]
        named = labels.get(PHASE_LABEL)
        if action.cordon is False and node.phases and vm.vgpu_type != node.types.get(PhaseName(named or "")):
            self.violate(f"uncordoned with the labels of another type: {node.name} {named} {vm.vgpu_type}")

    @override
    def judge_end(self) -> None:
        """Judge the world after a long calm time: the workers of the phase have its types and labels."""
        super().judge_end()
        phase = timeline_of(self.schedule).current(self.now)
        assert phase is not None
        reasons = {worker.node for worker in self.status.workers if worker.reason is not None}
        if self.status.transition is not None:
            return
        for node in self.cluster.nodes.values():
            if phase.phase not in node.phases or node.name in reasons:
                continue
            vm = self.hypervisor.vms[node.vm]
            if (vm.vgpu_type, node.labels.get(PHASE_LABEL)) != (node.types[phase.phase], phase.phase):
                self.violate(f"not in its profile: {node} {vm}")

    @property
    def _phase(self) -> PhaseName:
        """The phase that the controller brings about."""
        transition = self.status.transition
        phase = transition.phase if transition is not None else self.status.phase
        assert phase is not None
        return phase


def _profiles(phase: PhaseName) -> tuple[WorkerProfile, ...]:
    types = sorted({types[phase] for types in TYPES.values() if phase in types})
    return tuple(WorkerProfile(vgpu_type, ((PHASE_LABEL, phase),)) for vgpu_type in types)
