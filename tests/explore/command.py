"""A command beside the agent: `gpuvirt vfio bind` and `unbind`, as a separate process."""

from dataclasses import dataclass

from typing_extensions import override

from gpuvirt.cli.changes.podaccount import PodAccount
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu
from gpuvirt.model.inventory.isolation import UnitId, slots_of
from gpuvirt.model.reasons import Reason, refusals
from gpuvirt.node.change.gate.drainrequest import Agents, DrainRequest, beside_agents, desires_of
from gpuvirt.node.change.gate.gateerrors import UnitBusyError
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
            agents = Agents(world.agents.folder, lambda: _why_listed(world, unit))
            try:
                with beside_agents(site.gates, agents, request) as refusal:
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


def _why_listed(world: World, unit: UnitId) -> Reason | None:
    """Return a reason if the running plugin lists a device of the unit on its socket."""
    running = world.agents.running
    if running is None:
        return None
    view = running.agent.views.get()
    listed = {str(device.id) for one in view.resources for device in one.devices if device.healthy}
    members = set(scan(world.kernel).functions) & listed
    return refusals.still_listed(unit, "its socket", min(members)) if members else None
