"""A command beside the agent: `gpuvirt vfio bind` and `unbind`, as a separate process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from typing_extensions import override

from gpuvirt.cli.changes.podaccount import PodAccount
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu
from gpuvirt.model.inventory.isolation import slots_of
from gpuvirt.model.reasons import Reason
from gpuvirt.node.change.gate.drainrequest import DrainRequest, desires_of, drained
from gpuvirt.node.change.gate.gate import Gate, UnitBusyError, gate_at
from gpuvirt.node.change.inputs import Inputs
from gpuvirt.node.change.observation import observe
from gpuvirt.node.change.steps.changes import by_hand
from gpuvirt.node.change.steps.vgpusteps import Run
from gpuvirt.node.change.unitchange import Outcome, apply
from gpuvirt.paths import HostRoots
from tests.explore.reduction import STRANDS
from tests.explore.scenario import Action
from tests.explore.scheduler import Process, Strand
from tests.explore.world import World


@contextmanager
def without_agent(gate: Gate, request: DrainRequest) -> Iterator[Reason | None]:
    """Continue without an agent to answer."""
    del gate, request
    yield None


@dataclass(frozen=True)
class Command(Action):
    """A user binds a GPU by a command; the running agent leaves GPUs as they are."""

    touches = frozenset({STRANDS})
    gpu: PciAddress
    desired: DesiredDriver

    @override
    def act(self, world: World) -> None:
        process = Process(f"gpuvirt vfio {'bind' if self.desired is DesiredDriver.PASSTHROUGH else 'unbind'}")
        site = world.agents.host_of(process)
        ledger = world.disk.folder / "state/ledger.json"
        account = PodAccount(site.kernel, HostRoots.under(world.disk.folder), world.kubelet.paths, (ledger,))

        def run() -> None:
            inputs = Inputs(account.account, readings=account.readings)
            inventory = observe(site, inputs).inventory
            if self.gpu not in inventory.gpus:
                return
            unit = inventory.gpus[self.gpu].unit
            by_person = Run(lambda _: None, by_hand(unit, inputs.newest))
            desired = {self.gpu: DesiredGpu(self.desired)}
            slots = slots_of(inventory.facts.functions, inventory.units[unit])
            request = DrainRequest(unit, slots, f"{process.name} {self.gpu}", desires_of(desired))
            asks = drained if world.agents.running is not None else without_agent
            try:
                with asks(gate_at(site.locks), request) as refusal:
                    if refusal is not None:
                        outcome = Outcome.everywhere(refusal, desired)
                    else:
                        outcome = apply(site, unit, desired, inputs, by_person, inventory)
            except UnitBusyError as error:
                world.scheduler.add_line(f"  {process.name}: {error}")
                return
            for reason in outcome.reasons:
                world.scheduler.add_line(f"  {process.name}: {reason.text}")

        world.scheduler.spawn(Strand(process, process.name, run))
