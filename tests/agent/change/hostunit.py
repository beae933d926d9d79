"""The isolation unit of one GPU of a simulated host, its plans and its changes."""

from pathlib import Path

from gpuvirt.agent.change.changehost import Inputs
from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.change.steps.changes import by_hand
from gpuvirt.agent.change.steps.vgpusteps import Run
from gpuvirt.agent.change.unitchange import apply
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredUnit, DesiredVgpus
from gpuvirt.model.change.plan import Outcome, Plan
from gpuvirt.model.change.planner import plan_unit
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, load_host
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_host_in, driver_state, inputs

A10, T4 = PciAddress("0000:b1:00.0"), PciAddress("0000:3b:00.0")
L40S = PciAddress("0000:25:00.0")
WHOLE = DesiredGpu(DesiredDriver.PASSTHROUGH, DesiredVgpus(whole=True))
PASSTHROUGH, NATIVE = DesiredGpu(DesiredDriver.PASSTHROUGH), DesiredGpu(DesiredDriver.NATIVE)
W7900, W7900_AUDIO = PciAddress("0000:03:00.0"), PciAddress("0000:03:00.1")


class HostUnit:
    """The isolation unit of one GPU of a simulated host."""

    def __init__(self, host: str | HostSpec, gpu: PciAddress, folder: Path) -> None:
        self.kernel = build_host(load_host(host) if isinstance(host, str) else host)
        self.tools = SimTools(self.kernel)
        self.change_host = change_host_in(folder, self.kernel, self.tools)
        self.gpu = gpu
        self.taken: list[Step | RollBack] = []

    @property
    def id(self) -> UnitId:
        return driver_state(self.change_host).inventory.gpus[self.gpu].unit

    def plan(self, target: DesiredGpu, known: Inputs | None = None) -> Plan:
        desired: DesiredUnit = {self.gpu: target}
        return plan_unit(observe(self.change_host, known or inputs()).unit_state(desired), self.id, desired)

    def apply(self, target: DesiredGpu, known: Inputs | None = None) -> Outcome:
        self.taken.clear()
        run = Run(self.taken.append, by_hand(self.id, None))
        return apply(self.change_host, self.id, {self.gpu: target}, known or inputs(), run)

    def fill(self, **types: int) -> None:
        vgpus = DesiredVgpus({name.replace("_", "-"): number for name, number in types.items()})
        assert self.apply(DesiredGpu(DesiredDriver.NATIVE, vgpus)).reasons == ()

    @property
    def driver(self) -> str | None:
        return self.kernel.pci.functions[self.gpu].driver

    @property
    def types(self) -> list[str]:
        host = scan(self.kernel).vgpu_hosts.get(self.gpu)
        return sorted(str(vgpu.type).rpartition(" ")[2] for vgpu in host.live) if host is not None else []


def on_native_drivers(host: str, gpu: PciAddress, folder: Path) -> HostUnit:
    """Return the unit of a GPU whose functions have native drivers, on a host that has not loaded vfio-pci."""
    unit = HostUnit(host, gpu, folder)
    for address, function in unit.kernel.pci.functions.items():
        if function.driver != function.native_driver and function.native_driver is not None:
            unit.kernel.rebind(address, function.native_driver)
    unit.kernel.tree.remove(HostPath("/sys/bus/pci/drivers/vfio-pci"))
    return unit
