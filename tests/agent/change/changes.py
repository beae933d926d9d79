"""Changes of GPUs for tests: of drivers only, or of the vGPUs of one GPU."""

from collections.abc import Callable, Iterable
from pathlib import Path

from gpuvirt.agent.change.changehost import ChangeHost, Inputs
from gpuvirt.agent.change.gate.gatefiles import GateFiles
from gpuvirt.agent.change.gate.gatepass import Pass
from gpuvirt.agent.change.observation import HostObservation, observe
from gpuvirt.agent.change.steps.changes import Change, by_hand
from gpuvirt.agent.change.steps.vgpusteps import Run
from gpuvirt.agent.change.unitchange import apply
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.tools import Tools
from gpuvirt.hardware.scan import scan
from gpuvirt.model.allocation.allocations import Allocations, Unknown
from gpuvirt.model.allocation.podallocations import PodAllocations
from gpuvirt.model.change.desired import DesiredDrivers, DesiredGpu, DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.planner import plan_unit
from gpuvirt.model.change.state import Account, UnitState
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.change.vgpus.gpustate import Holding
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason

ReportStep = Callable[[Step | RollBack], None]
NO_PODS: Allocations = {}


UNGATED = Pass(GateFiles(Path("/nonexistent")), (), ())
"""The pass of a change of no slots, in a test that nothing else changes."""


def change_host_in(folder: Path, kernel: Kernel, tools: Tools) -> ChangeHost:
    """Return a host whose records of changes are in a folder."""
    return ChangeHost(kernel, tools, folder / "drivers.json", folder / "locks", folder / "device-plugins")


def inputs(
    pods: Allocations | Unknown = NO_PODS,
    *,
    holdings: Iterable[Holding] = (),
    allowed: Iterable[PciAddress] = (),
    forced: bool = False,
    ask: Callable[[Inventory], PodAllocations] | None = None,
) -> Inputs:
    """Return inputs besides the host's state; `ask` is called for the pods' allocations at each observation."""

    def account(inventory: Inventory) -> Account:
        found = ask(inventory) if ask is not None else PodAllocations()
        return Account({**pods, **found.by_gpu(inventory)} if not isinstance(pods, Unknown) else pods, found, given)

    given = tuple(holdings)
    return Inputs(account, allowed=frozenset(allowed), forced=forced)


NOBODY = inputs()
"""No pod has a device."""


def say_nothing(step: Step | RollBack) -> None:
    """Ignore a step."""


def driver_state(change_host: ChangeHost, known: Inputs = NOBODY) -> UnitState:
    """Return the state that plans of drivers follow from."""
    return observe(change_host, known).host_state()


def change_drivers(
    change_host: ChangeHost,
    unit: UnitId,
    drivers: DesiredDrivers,
    known: Inputs = NOBODY,
    report: ReportStep = say_nothing,
    change: Change | None = None,
) -> tuple[Reason, ...]:
    """Bind the GPUs of a unit to drivers, and return the reasons of a failure."""
    desired = {gpu: DesiredGpu(driver) for gpu, driver in drivers.items()}
    return apply(change_host, unit, desired, known, Run(report, change or by_hand(unit, known.newest))).reasons


def change_vgpus(
    change_host: ChangeHost,
    gpu: PciAddress,
    vgpus: DesiredVgpus,
    known: Inputs = NOBODY,
    report: ReportStep = say_nothing,
    first: Inventory | None = None,
) -> tuple[Reason, ...]:
    """Create the desired vGPUs of a GPU, and return the reasons of a failure."""
    first = first or build_inventory(scan(change_host.kernel))
    unit = first.gpus[gpu].unit if gpu in first.gpus else UnitId(gpu)
    return apply(
        change_host, unit, {gpu: DesiredGpu(vgpus=vgpus)}, known, Run(report, by_hand(unit, known.newest)), first
    ).reasons


def plan_vgpus(seen: HostObservation, gpu: PciAddress, vgpus: DesiredVgpus) -> VgpuPlan:
    """Return the next plan for a GPU."""
    desired = {gpu: DesiredGpu(vgpus=vgpus)}
    return plan_unit(seen.unit_state(desired), seen.inventory.gpus[gpu].unit, desired).vgpus_of(gpu)
