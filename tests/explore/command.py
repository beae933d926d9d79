"""A command line beside the agent: `gpuvirt vfio bind` and `unbind`, as a process of its own."""

from dataclasses import dataclass

from typing_extensions import override

from explore.scenario import Action
from explore.scheduler import Process, Strand
from explore.world import World
from gpuvirt.cli.podaccount import PodAccount
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu
from gpuvirt.node.change.changes import by_hand
from gpuvirt.node.change.gate import UnitBusyError
from gpuvirt.node.change.inputs import Inputs
from gpuvirt.node.change.observation import observe
from gpuvirt.node.change.unitchange import apply
from gpuvirt.node.change.vgpusteps import Run
from gpuvirt.paths import HostRoots


@dataclass(frozen=True)
class Command(Action):
    """Somebody moves a GPU by hand; the agent that runs leaves GPUs as they are."""

    gpu: PciAddress
    wish: DesiredDriver

    @override
    def act(self, world: World) -> None:
        process = Process(f"gpuvirt vfio {'bind' if self.wish is DesiredDriver.PASSTHROUGH else 'unbind'}")
        site = world.host_of(process)
        ledger = world.disk.folder / "state/ledger.json"
        account = PodAccount(site.kernel, HostRoots.under(world.disk.folder), world.kubelet.paths, (ledger,))

        def run() -> None:
            inputs = Inputs(account.account)
            inventory = observe(site, inputs).inventory
            if self.gpu not in inventory.gpus:
                return
            unit = inventory.gpus[self.gpu].unit
            by_person = Run(lambda _: None, by_hand(unit, inputs.newest))
            try:
                reasons = apply(site, unit, {self.gpu: DesiredGpu(self.wish)}, inputs, by_person, inventory).reasons
            except UnitBusyError as error:
                world.scheduler.tell(f"  {process.name}: {error}")
                return
            for reason in reasons:
                world.scheduler.tell(f"  {process.name}: {reason.text}")

        world.scheduler.spawn(Strand(process, process.name, run))
