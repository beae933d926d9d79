"""A command line beside the agent: `gpuvirt vfio bind` and `unbind`, as a process of its own."""

from dataclasses import dataclass

from typing_extensions import override

from explore.scenario import Action
from explore.scheduler import Process, Strand
from explore.world import World
from gpuvirt.cli.podaccount import PodAccount
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.plan import Wish
from gpuvirt.node import binder
from gpuvirt.node.binder import Orders
from gpuvirt.node.guard import UnitBusyError
from gpuvirt.paths import HostRoots


@dataclass(frozen=True)
class Command(Action):
    """Somebody moves a GPU by hand; the agent that runs leaves GPUs as they are."""

    gpu: PciAddress
    wish: Wish

    @override
    def act(self, world: World) -> None:
        process = Process(f"gpuvirt vfio {'bind' if self.wish is Wish.PASSTHROUGH else 'unbind'}")
        site = world.host_of(process)
        ledger = world.disk.folder / "state/ledger.json"
        account = PodAccount(site.kernel, HostRoots.under(world.disk.folder), world.kubelet.paths, (ledger,))

        def run() -> None:
            orders = Orders({}, ask=account.allocations)
            inventory = binder.look(site, orders).inventory
            if self.gpu not in inventory.gpus:
                return
            try:
                reasons = binder.move(
                    site, inventory.gpus[self.gpu].unit, {self.gpu: self.wish}, orders, lambda _: None
                )
            except UnitBusyError as error:
                world.scheduler.tell(f"  {process.name}: {error}")
                return
            for reason in reasons:
                world.scheduler.tell(f"  {process.name}: {reason.text}")

        world.scheduler.spawn(Strand(process, process.name, run))
