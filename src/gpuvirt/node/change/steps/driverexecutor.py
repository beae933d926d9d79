"""Takes the steps of a driver plan, each with the proof that nobody uses its function.

VFIO devices are leased and NVIDIA's driver is locked before the first step. For every other native driver the step
itself walks through all processes, since modprobe and other unbinds take seconds. The kernel may block every step, so
they run in the serial worker of the plan's unit. After each step the result is verified: the kernel reports success for
a probe after which no driver is bound to the function.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof, UnprovenError
from gpuvirt.hardware.access.tools import ToolError, Tools
from gpuvirt.hardware.functions import binding, modules
from gpuvirt.hardware.usage.users import cdevs_of
from gpuvirt.model.change.plan import DriverPlan, Scope, StepScope
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
from gpuvirt.model.reasons import Reason, refusals
from gpuvirt.node.change.steps import driversteps, proving
from gpuvirt.node.change.steps.changes import Change
from gpuvirt.node.change.steps.leasing import Claim, Prove, RefusedError, leased, what_failed


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
    if not plan.steps:
        return
    _claim(functions, plan, change)
    with contextlib.ExitStack() as held:
        leases: dict[PciAddress, Prove] = {}
        for group in plan.leases:
            members = [function for function in functions.values() if function.iommu_group == group]
            addresses = tuple(member.address for member in members)
            claim = Claim(addresses[0], group, tuple(cdevs_of(members)), addresses)
            leases |= dict.fromkeys(addresses, held.enter_context(leased(kernel, claim)))
        locks: dict[PciAddress, Proof] = {}
        for address in plan.locks:
            if (lock := held.enter_context(proving.locked(kernel, address))) is not None:
                locks[address] = lock
        taking = _Taking(kernel, tools, functions, plan, leases, locks)
        for step in plan.steps:
            restores = not isinstance(step, Unbind)
            with change.step(_scope_of_step(plan, step), step.text, restores=restores):
                report(step)
                with change.modules() if isinstance(step, LoadModule) else contextlib.nullcontext():
                    taking.take(step)


def _claim(functions: Mapping[PciAddress, PciFunction], plan: DriverPlan, change: Change) -> None:
    """Close the functions of the plan's steps, and all functions of the IOMMU groups that it leases, to Allocate."""
    group_members = [function.address for function in functions.values() if function.iommu_group in plan.leases]
    scopes = [_scope_of_step(plan, step) for step in plan.steps]
    scope = scopes[0].with_all([*scopes[1:], *([StepScope.of(group_members)] if group_members else [])])
    taken = {*group_members, *(step.address for step in plan.steps if isinstance(step, Unbind))}
    given_back = scope.taken.functions - taken
    change.claim(scope, StepScope.of(given_back) if given_back else None)


def _scope_of_step(plan: DriverPlan, step: DriverStep) -> StepScope:
    if not isinstance(step, LoadModule):
        return StepScope.of([step.address])
    return StepScope(frozenset(other.address for other in plan.steps if not isinstance(other, LoadModule)), Scope())


@dataclass(frozen=True, slots=True)
class _Taking:
    """The steps of one plan, with the leases and locks that are held for them."""

    kernel: Kernel
    tools: Tools
    functions: Mapping[PciAddress, PciFunction]
    plan: DriverPlan
    leases: Mapping[PciAddress, Prove]
    locks: Mapping[PciAddress, Proof]
    unbound: set[PciAddress] = field(default_factory=set)
    """The functions that this plan has unbound."""

    def take(self, step: DriverStep) -> None:
        """Take a step and verify its effect; raise RefusedError."""
        subject = step.driver if isinstance(step, LoadModule) else step.address
        try:
            self._take(step)
        except (OSError, ToolError, UnprovenError) as error:
            raise RefusedError(refusals.failed(step.text, subject, what_failed(error))) from error

    def _take(self, step: DriverStep) -> None:
        match step:
            case LoadModule():
                driversteps.load(self.kernel, self.tools, step)
            case ClearOverride():
                driversteps.clear_override(self.kernel, step)
            case Unlock():
                driversteps.unlock(self.kernel, step)
            case Return(address):
                driversteps.give_back(self.kernel, self.tools, step, lambda: self._prove_driverless(step, address))
            case Override(address, driver):
                desired = (modules.has_driver(self.kernel, driver) or driver).encode()
                self.kernel.write(device_path(address, "driver_override"), desired)
            case Unbind(address, driver):
                binding.unbind(self.kernel, address, driver, self._prove_unused(step))
                self._expect(step, address, None)
                self.unbound.add(address)
            case Probe(address, driver):
                desired_driver = modules.has_driver(self.kernel, driver) or driver
                if modules.driver_of(self.kernel, address) != desired_driver:  # a module that was just loaded binds it
                    binding.probe(self.kernel, address, self._prove_driverless(step, address))
                self._expect(step, address, desired_driver)

    def _prove_unused(self, step: Unbind) -> Proof:
        """Prove that nobody uses a function that is about to lose its driver; raise RefusedError."""
        function = self.functions[step.address]
        if (prove := self.leases.get(step.address)) is not None and function.on_vfio:
            return prove()
        if function.on_vfio:
            raise RefusedError(_why_not_leased(function))
        if (lock := self.locks.get(step.address)) is not None:
            return lock
        if self.plan.forced:
            return proving.forced(self.kernel, step.address, step.driver, step.text)
        return proving.walked(self.kernel, self._native_siblings(step.address), forcible=True)

    def _native_siblings(self, address: PciAddress) -> tuple[PciAddress, ...]:
        """Return a function, and those of its slot that the plan takes later and that no lock protects.

        A process that uses one of them loses the card, so the change stops before the first of them.
        """
        later = {step.address for step in self.plan.steps if isinstance(step, Unbind)} - self.unbound
        siblings = [other for other in sorted(later) if slot_of(other) == slot_of(address)]
        native = [other for other in siblings if other not in self.locks and not self.functions[other].on_vfio]
        return (address, *(other for other in native if other != address))

    def _prove_driverless(self, step: DriverStep, address: PciAddress) -> Proof:
        unbound_here = address in self.unbound
        return proving.driverless(self.kernel, self.functions, address, step.text, unbound_here=unbound_here)

    def _expect(self, step: DriverStep, address: PciAddress, driver: str | None) -> None:
        """Verify the driver of a function after a step; raise RefusedError."""
        proving.expect_driver(self.kernel, address, driver, step.text)


def _why_not_leased(function: PciFunction) -> Reason:
    """Return why a function on a VFIO driver can't be leased: its group is not known."""
    if isinstance(function.iommu_group, Unread):
        return refusals.unread(function.address, function.iommu_group)
    return refusals.no_group(function.address)
