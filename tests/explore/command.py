"""Commands beside the agent, as separate processes: `gpuvirt vfio bind` and `unbind`, `vgpu apply` and `delete`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.agent.change import unitchange
from gpuvirt.agent.change.changehost import ChangeHost, Inputs
from gpuvirt.agent.change.gate.drainrequest import Agents, DrainRequest, beside_agents, desires_of
from gpuvirt.agent.change.gate.gatelock import UnitBusyError
from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.change.steps.changes import by_hand
from gpuvirt.agent.change.steps.vgpusteps import Run
from gpuvirt.agent.change.unitchange import apply
from gpuvirt.cli.podaccount import AllocationReader
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredUnit, DesiredVgpus
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId, slots_of
from gpuvirt.model.reasons import Reason, refusals
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
    forced: bool = False
    """Whether the GPU is taken from processes that use it natively (`--force`)."""
    also: frozenset[PciAddress] = frozenset()
    """Functions of other slots whose driver may change, too (`--also`)."""

    @override
    def act(self, world: World) -> None:
        word = "bind" if self.desired is DesiredDriver.PASSTHROUGH else "unbind"
        process = Process(f"gpuvirt vfio {word}{' --force' if self.forced else ''}")
        if self.forced:
            world.observer.forced.add(process)
        desired = {self.gpu: DesiredGpu(self.desired)}

        def change(change_host: ChangeHost, inputs: Inputs, unit: UnitId, first: Inventory) -> tuple[Reason, ...]:
            inputs = replace(inputs, allowed=self.also, forced=self.forced)
            return apply(change_host, unit, desired, inputs, _by_person(unit, inputs), first).reasons

        _run(world, process, self.gpu, desired, change)


@dataclass(frozen=True)
class ApplyVgpus(Action):
    """A user sets the vGPUs of a GPU: `gpuvirt vgpu apply` and `create`."""

    touches = frozenset({STRANDS})
    gpu: PciAddress
    types: tuple[str, ...]
    """The type of each desired vGPU."""

    @override
    def act(self, world: World) -> None:
        desired = {self.gpu: DesiredGpu(vgpus=DesiredVgpus(Counter(self.types)))}

        def change(change_host: ChangeHost, inputs: Inputs, unit: UnitId, first: Inventory) -> tuple[Reason, ...]:
            return apply(change_host, unit, desired, inputs, _by_person(unit, inputs), first).reasons

        _run(world, Process("gpuvirt vgpu apply"), self.gpu, desired, change)


@dataclass(frozen=True)
class DeleteVgpu(Action):
    """A user removes the first vGPU of a GPU: `gpuvirt vgpu delete`."""

    touches = frozenset({STRANDS})
    gpu: PciAddress

    @override
    def act(self, world: World) -> None:
        def change(change_host: ChangeHost, inputs: Inputs, unit: UnitId, first: Inventory) -> tuple[Reason, ...]:
            del unit
            live = sorted(vgpu.id for vgpu in first.facts.vgpu_hosts[self.gpu].live)
            return unitchange.remove_vgpu(change_host, self.gpu, live[0], inputs, lambda _: None, first) if live else ()

        _run(world, Process("gpuvirt vgpu delete"), self.gpu, {self.gpu: DesiredGpu(vgpus=DesiredVgpus())}, change)


Changing = Callable[[ChangeHost, Inputs, UnitId, Inventory], tuple[Reason, ...]]


def _by_person(unit: UnitId, inputs: Inputs) -> Run:
    return Run(lambda _: None, by_hand(unit, inputs.newest))


def _run(world: World, process: Process, gpu: PciAddress, desired: DesiredUnit, change: Changing) -> None:
    """Run a command as a process of its own, once the agents let it."""
    change_host = world.agents.host_of(process)
    ledger = world.disk.folder / "state/ledger.json"
    account = AllocationReader(change_host.kernel, HostRoots.under(world.disk.folder), world.kubelet.paths, (ledger,))

    def run() -> None:
        inputs = Inputs(account.account, readings=account.readings)
        inventory = observe(change_host, inputs).inventory
        if gpu not in inventory.gpus:
            return
        unit = inventory.gpus[gpu].unit
        slots = slots_of(inventory.facts.functions, inventory.units[unit])
        request = DrainRequest(unit, slots, f"{process.name} {gpu}", desires_of(desired))
        agents = Agents(world.agents.folder, lambda: _why_listed(world, unit))
        try:
            with beside_agents(change_host.gates, agents, request) as refusal:
                reasons = (refusal,) if refusal is not None else change(change_host, inputs, unit, inventory)
        except UnitBusyError as error:
            world.scheduler.add_line(f"  {process.name}: {error}")
            return
        for reason in reasons:
            world.scheduler.add_line(f"  {process.name}: {reason.text}")

    world.scheduler.spawn(Strand(process, process.name, run))


def _why_listed(world: World, unit: UnitId) -> Reason | None:
    """Return a reason if the running plugin lists a device of the unit on its socket."""
    running = world.agents.running
    if running is None:
        return None
    view = running.agent.views.get()
    listed = {str(device.id) for resource in view.resources for device in resource.devices if device.healthy}
    members = set(scan(world.kernel).functions) & listed
    return refusals.agent_silent(unit, "its socket", min(members)) if members else None
