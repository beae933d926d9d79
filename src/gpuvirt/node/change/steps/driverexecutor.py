"""Takes the steps of a driver plan, under leases of the devices, so that no VM can open one of them meanwhile.

The kernel may block every step, so they run in the serial worker of the plan's unit. After each step the result is
verified: the kernel reports success for a probe after which no driver is bound to the function.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.sysfs import DRIVERS_PROBE, device_path, driver_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.tools import ToolError, Tools
from gpuvirt.hardware.functions import modules
from gpuvirt.hardware.usage import nativeusers
from gpuvirt.hardware.usage.users import cdevs_of
from gpuvirt.model.change.plan import DriverPlan, Scope
from gpuvirt.model.change.steps import (
    ClearOverride,
    DriverStep,
    LoadModule,
    Override,
    Probe,
    Return,
    Unbind,
    Unlock,
)
from gpuvirt.model.reasons import Seen, refusals
from gpuvirt.node.change.steps import driversteps
from gpuvirt.node.change.steps.changes import Change
from gpuvirt.node.change.steps.leasing import Claim, RefusedError, leased, what_failed


def execute(
    kernel: Kernel,
    tools: Tools,
    functions: Mapping[PciAddress, PciFunction],
    plan: DriverPlan,
    report: Callable[[DriverStep], None],
    change: Change,
) -> None:
    """Take all steps of a plan that has no refusals; raise RefusedError at the first step that fails.

    `functions` are those that the plan was made from. `report` is called with each step before it begins. Before
    devices are leased or locked, `change` refuses allocated ones.
    """
    change.claim(_scope(functions, plan))
    with contextlib.ExitStack() as held:
        for group in plan.leases:
            members = [function for function in functions.values() if function.iommu_group == group]
            held.enter_context(leased(kernel, Claim(members[0].address, group, tuple(cdevs_of(members)))))
        for address in plan.locks:
            held.enter_context(_locked(kernel, address))
        for step in plan.steps:
            with change.step(_scope_of_step(step), step.text):
                report(step)
                with change.modules() if isinstance(step, LoadModule) else contextlib.nullcontext():
                    _take(kernel, tools, step)


def _scope(functions: Mapping[PciAddress, PciFunction], plan: DriverPlan) -> Scope:
    """Return the functions of the plan's steps, and all functions of the IOMMU groups that it leases."""
    leased_functions = [function.address for function in functions.values() if function.iommu_group in plan.leases]
    return Scope(frozenset(leased_functions)).with_all(_scope_of_step(step) for step in plan.steps)


def _scope_of_step(step: DriverStep) -> Scope:
    return Scope() if isinstance(step, LoadModule) else Scope(frozenset({step.address}))


def _take(kernel: Kernel, tools: Tools, step: DriverStep) -> None:
    subject = step.driver if isinstance(step, LoadModule) else step.address
    try:
        match step:
            case LoadModule():
                driversteps.load(kernel, tools, step)
            case ClearOverride():
                driversteps.clear_override(kernel, step)
            case Unlock():
                driversteps.unlock(kernel, step)
            case Return():
                driversteps.give_back(kernel, tools, step)
            case Override(address, driver):
                desired = (modules.has_driver(kernel, driver) or driver).encode()
                kernel.write(device_path(address, "driver_override"), desired)
            case Unbind(address, driver):
                kernel.write(driver_path(driver, "unbind"), address.encode())
                _expect(kernel, step, address, None)
            case Probe(address, driver):
                kernel.write(DRIVERS_PROBE, address.encode())
                _expect(kernel, step, address, modules.has_driver(kernel, driver) or driver)
    except (OSError, ToolError) as error:
        raise RefusedError(refusals.failed(step.text, subject, what_failed(error))) from error


def _expect(kernel: Kernel, step: DriverStep, address: PciAddress, driver: str | None) -> None:
    found = modules.driver_of(kernel, address)
    if found != driver:
        bound = f"driver {found}" if isinstance(found, str) else "no driver" if found is None else str(found)
        link = device_path(address, "driver")
        expected = f"driver {driver}" if driver is not None else "no driver"
        raise RefusedError(refusals.failed(step.text, address, Seen(link, f"{bound}; expected: {expected}")))


@contextlib.contextmanager
def _locked(kernel: Kernel, address: PciAddress) -> Iterator[None]:
    """Keep new clients out of NVIDIA's driver for a GPU; the driver agrees to that only while it has no clients.

    A GPU that keeps its driver is unlocked at the end. A GPU that loses its driver loses the lock with it. Drivers
    without this lock are not asked.
    """
    lock = driversteps.unbind_lock(address)
    try:
        kernel.write(lock, b"1")
    except OSError as error:
        if error.errno not in attributes.ABSENT:
            raise RefusedError(refusals.failed("lock", address, what_failed(error))) from error
        yield
        return
    if attributes.text(kernel, lock) != "1":
        clients = nativeusers.read_native_users(kernel, [address]) or {}
        raise RefusedError(refusals.locked(address, clients.get(address, ())))
    try:
        yield
    finally:
        if modules.driver_of(kernel, address) == "nvidia":
            with contextlib.suppress(OSError):
                kernel.write(lock, b"0")
