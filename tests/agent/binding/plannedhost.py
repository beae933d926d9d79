"""A simulated host with its driver record and locks, on which drivers are changed."""

from collections.abc import Sequence
from pathlib import Path

from gpuvirt.agent.change.changehost import Inputs
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.driverplanning import plan_units
from gpuvirt.model.change.plan import DriverPlan
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, change_drivers, change_host_in, driver_state


class PlannedHost:
    """A simulated host with its driver record and locks."""

    def __init__(self, kernel: SimKernel, folder: Path) -> None:
        self.kernel = kernel
        self.tools = SimTools(kernel)
        self.change_host = change_host_in(folder, kernel, self.tools)

    def plans(self, desired_driver: DesiredDriver, *gpus: str, orders: Inputs = NOBODY) -> Sequence[DriverPlan]:
        return plan_units(driver_state(self.change_host, orders), dict.fromkeys(map(PciAddress, gpus), desired_driver))

    def move(self, desired_driver: DesiredDriver, gpu: str, orders: Inputs = NOBODY) -> Sequence[Reason]:
        address = PciAddress(gpu)
        unit = driver_state(self.change_host, orders).inventory.gpus[address].unit
        return change_drivers(self.change_host, unit, {address: desired_driver}, orders, lambda _: None)

    def without_vfs(self) -> PciAddress:
        gpus = driver_state(self.change_host, NOBODY).inventory.gpus
        return next(address for address, gpu in gpus.items() if not gpu.function.virtfns)

    def refused(self, desired_driver: DesiredDriver, gpu: str, orders: Inputs = NOBODY) -> set[ReasonCode]:
        self.kernel.writes.clear()
        codes = {reason.code for reason in self.move(desired_driver, gpu, orders)}
        assert self.kernel.writes == [], "a refused change has written to the host"
        return codes
