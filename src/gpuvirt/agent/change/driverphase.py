"""The driver phase of a change: takes the steps of a driver plan, each with its proof, and undoes what it can't finish.

VFIO devices are leased and NVIDIA's driver is locked before the first step. For every other native driver the step
itself walks through all processes, since modprobe and other unbinds take seconds. The kernel may block every step, so
they run in the serial worker of the plan's unit. After each step the result is verified: the kernel reports success for
a probe after which no driver is bound to the function. A step that returns a function to its native driver can be
repeated after a crash.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.steps import proving
from gpuvirt.agent.change.steps.changerecord import ChangeRecord
from gpuvirt.agent.change.steps.changes import Change, StalePlanError
from gpuvirt.agent.change.steps.leasing import GroupClaim, Prove, RefusedError, leased, what_failed
from gpuvirt.agent.change.steps.proving import unbind_lock
from gpuvirt.agent.change.steps.vgpusteps import Run
from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.facts.pci import VFIO_DRIVERS, PciFunction, Unread
from gpuvirt.facts.sysfs import PCI_DRIVERS, device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof, UnprovenError
from gpuvirt.hardware.access.tools import ToolError, Tools
from gpuvirt.hardware.functions import iommu, modules
from gpuvirt.hardware.usage.users import cdevs_of
from gpuvirt.model.change.driverplanning import plan_return
from gpuvirt.model.change.plan import DriverPlan, Scope, StepScope
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.steps import (
    ClearOverride,
    DriverStep,
    LoadModule,
    Override,
    Probe,
    Return,
    RollBack,
    Unbind,
    Unlock,
)
from gpuvirt.model.reasons import Reason, Seen, nodeproblems, refusals
from gpuvirt.model.reasons.reason import driver_link
from gpuvirt.model.reasons.refusals import KERNEL_LOG

NO_OVERRIDE = b"\n"
"""The content that clears an override. The kernel ignores an empty write."""
UNSET = "(null)"
"""The kernel's text for a driver_override that is not set."""
UNTRUSTED = ("Key was rejected by service", "Required key not available")
"""The error texts of modprobe for a module without a signature that the kernel trusts (EKEYREJECTED, ENOKEY;
Documentation/admin-guide/module-signing.rst)."""
TRUST = (
    "sign the module and enroll the key (mokutil --import KEY, then reboot), or install one that the distribution has"
    " signed: with Secure Boot the kernel loads no other (mokutil --sb-state)"
)
NO_DEVICE = "No such device"
"""The error text of modprobe for a module that finds no free device (ENODEV), such as NVIDIA's."""


def load(kernel: Kernel, tools: Tools, step: LoadModule) -> None:
    """Load a driver's module; raise ToolError, or RefusedError if the driver is not registered afterwards."""
    try:
        tools.modprobe(step.driver)
    except ToolError as error:
        # nvidia.ko is not loaded without a GPU that it can have, and all are on VFIO drivers yet.
        if step.may_need_device and NO_DEVICE in error.output:
            return  # unknown: nothing, the module needs a device first
        raise
    desired = step.provides or (step.driver,)
    if not any(modules.loaded_as(kernel, driver) for driver in desired):
        missing = (Seen.absent(f"{PCI_DRIVERS}/{driver}") for driver in desired)
        raise RefusedError(refusals.failed(step.text, step.driver, *missing))


def clear_override(kernel: Kernel, step: ClearOverride) -> None:
    """Clear gpuvirt's own driver override. An override of another program stays, and may stop the change."""
    path = device_path(step.address, "driver_override")
    found = attributes.text(kernel, path)
    if found in step.ours:
        kernel.write(path, NO_OVERRIDE)
    elif found is not None and not isinstance(found, str):
        raise RefusedError(refusals.unread(step.address, found))
    elif found not in {None, "", UNSET, *step.desired} and step.required:
        raise RefusedError(refusals.pinned(step.address, str(found), by_driverctl=False))


def unlock(kernel: Kernel, step: Unlock) -> None:
    """Let NVIDIA's driver accept clients again."""
    lock = unbind_lock(step.address)
    if attributes.text(kernel, lock) == "1":
        kernel.write(lock, b"0")


def give_back(kernel: Kernel, tools: Tools, step: Return, prove: Prove) -> None:
    """Bind a function to a native driver. `prove` makes the proof that it has no driver.

    The function is bound by the driver's name: in a probe, a VFIO driver with a dynamic id for the function would win.
    """
    if modules.driver_of(kernel, step.address) is not None:  # a module that was just loaded has bound it
        return _expect_native(kernel, step)
    if step.drivers and not any(modules.loaded_as(kernel, driver) for driver in step.drivers):
        tools.modprobe(step.drivers[0])  # before, there was no free device
    loaded = [name for driver in step.drivers for name in modules.loaded_as(kernel, driver)]
    if modules.driver_of(kernel, step.address) is None and not any(
        _binds(kernel, step, name, prove) for name in loaded
    ):
        modules.probe(kernel, step.address, prove())
    return _expect_native(kernel, step)


def _binds(kernel: Kernel, step: Return, driver: str, prove: Prove) -> bool:
    """Bind a function to a driver; return whether that worked. The kernel does not report all failures."""
    proof = prove()
    try:
        modules.bind(kernel, step.address, driver, proof)
    except OSError:
        return False  # unknown: the caller probes, and then verifies the driver
    return modules.driver_of(kernel, step.address) is not None


def _expect_native(kernel: Kernel, step: Return) -> None:
    found, vfio = modules.driver_of(kernel, step.address), iommu.read_cdevs(kernel, device_path(step.address))
    if isinstance(vfio, Unread):
        raise RefusedError(refusals.unread(step.address, vfio))
    if isinstance(found, str) and (found in VFIO_DRIVERS or (vfio and found != "nvidia")):
        raise RefusedError(
            refusals.failed(
                step.text,
                step.address,
                driver_link(step.address, found),
                fix=f"{found} has the function's ids and takes it again; remove them: vfio-pci.ids= on the kernel's"
                " command line, options vfio-pci ids= in /etc/modprobe.d, and until the next boot"
                f" {sysfs.driver_path(found, 'remove_id')}",
            )
        )
    if found is None and step.required:
        raise RefusedError(
            refusals.failed(
                step.text,
                step.address,
                driver_link(step.address, None),
                fix="see the kernel's log (dmesg) for why the driver refuses it, and whether it is loaded; gpuvirt"
                " tries again",
            )
        )
    if found is not None and not isinstance(found, str):
        raise RefusedError(refusals.unread(step.address, found))


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
            claim = GroupClaim(addresses[0], group, tuple(cdevs_of(members)), addresses)
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


class _Taking(msgspec.Struct, frozen=True):
    """The steps of one plan, with the leases and locks that are held for them."""

    kernel: Kernel
    tools: Tools
    functions: Mapping[PciAddress, PciFunction]
    plan: DriverPlan
    leases: Mapping[PciAddress, Prove]
    locks: Mapping[PciAddress, Proof]
    unbound: set[PciAddress] = msgspec.field(default_factory=set)
    """The functions that this plan has unbound."""

    def take(self, step: DriverStep) -> None:
        """Take a step and verify its effect; raise RefusedError."""
        subject = step.driver if isinstance(step, LoadModule) else step.address
        try:
            self._take(step)
        except (OSError, ToolError, UnprovenError) as error:
            fix = TRUST if any(text in str(error) for text in UNTRUSTED) else KERNEL_LOG
            raise RefusedError(refusals.failed(step.text, subject, what_failed(error), fix=fix)) from error

    def _take(self, step: DriverStep) -> None:
        match step:
            case LoadModule():
                load(self.kernel, self.tools, step)
            case ClearOverride():
                clear_override(self.kernel, step)
            case Unlock():
                unlock(self.kernel, step)
            case Return(address):
                give_back(self.kernel, self.tools, step, lambda: self._prove_driverless(step, address))
            case Override(address, driver):
                desired = (modules.has_driver(self.kernel, driver) or driver).encode()
                self.kernel.write(device_path(address, "driver_override"), desired)
            case Unbind(address, driver):
                modules.unbind(self.kernel, address, driver, self._prove_unused(step))
                self._expect(step, address, None)
                self.unbound.add(address)
            case Probe(address, driver):
                desired_driver = modules.has_driver(self.kernel, driver) or driver
                if modules.driver_of(self.kernel, address) != desired_driver:  # a module that was just loaded binds it
                    modules.probe(self.kernel, address, self._prove_driverless(step, address))
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


log = logging.getLogger(__name__)

Observe = Callable[[], UnitState]


def take(
    change_host: ChangeHost,
    state: UnitState,
    plan: DriverPlan,
    observe: Observe,
    run: Run,
    concerned: Iterable[PciAddress],
) -> tuple[Reason, ...]:
    """Take the steps of a plan; return why that failed, and why the rollback failed.

    `observe` observes the unit before a rollback. `concerned` are the functions that have their desired drivers once
    the plan is done.
    """
    record = _record(change_host, state)
    try:
        record.begin(plan)
    except OSError as error:
        return (_unrecorded(change_host, plan, error),)
    touched: set[PciAddress] = set()

    def begin(step: DriverStep) -> None:
        if not isinstance(step, LoadModule):
            touched.add(step.address)
        _record_return(change_host, state, step)
        run.report(step)

    failed = _carry_out(change_host, state, plan, begin, run)
    if failed is None:
        try:
            record.settle(plan, concerned)
        except OSError as error:  # the drivers are as desired; the next attempt records that
            return (_unrecorded(change_host, plan, error),)
        return ()
    before = _to_put_back(state, touched, failed)
    reasons: tuple[Reason, ...] = ()
    if before:
        run.report(RollBack(plan.unit))
        reasons = _put_back(change_host, plan, before, observe, run)
    with _despite_errors():
        record.keep(plan, touched)
    return (failed.reason, *reasons)


def _record_return(change_host: ChangeHost, state: UnitState, step: DriverStep) -> None:
    """Record that a GPU leaves its VFIO driver, which has reset it if the kernel can reset it.

    vfio-pci resets a GPU when a VM closes it, and the lease of its group proves that no VM has it open. Without this
    record the last VM counts as the GPU's tenant, whose memory may still be there.
    """
    inventory = state.inventory
    if not isinstance(step, Unbind) or step.address not in inventory.gpus:
        return
    functions, boot_id = inventory.facts.functions, inventory.facts.platform.boot_id
    if functions[step.address].on_vfio:
        try:
            change_host.tenancies.update(lambda found: found.of_boot(boot_id).returned(functions, [step.address]))
        except OSError as error:
            log.warning(  # unknown: its last tenant stays recorded
                "%s: its last tenant counts as present: %s: %s", step.address, change_host.tenancies.path, error
            )


def settle(change_host: ChangeHost, state: UnitState, plan: DriverPlan, concerned: Iterable[PciAddress]) -> None:
    """Record that functions have their desired drivers, so that started changes of killed processes are done."""
    _record(change_host, state).settle(plan, concerned)


def _to_put_back(state: UnitState, touched: Iterable[PciAddress], failed: RefusedError) -> Mapping[PciAddress, bool]:
    """Return the functions that get their former driver back, with whether that is a VFIO driver.

    A function that had no driver is left out: its change stays recorded, and the next plan follows the desired state.
    """
    had = {address: state.inventory.facts.functions[address] for address in touched}
    before = {address: function.on_vfio for address, function in had.items() if not function.is_idle}
    if isinstance(failed, StalePlanError):
        return before
    # A GPU that leaves its VFIO driver is not bound to it again: the next change would fail in the same way.
    return {address: on_vfio for address, on_vfio in before.items() if not on_vfio}


def _carry_out(
    change_host: ChangeHost, state: UnitState, plan: DriverPlan, report: Callable[[DriverStep], None], run: Run
) -> RefusedError | None:
    try:
        execute(change_host.kernel, change_host.tools, state.inventory.facts.functions, plan, report, run.change)
    except RefusedError as error:
        return error
    return None


def _put_back(
    change_host: ChangeHost, plan: DriverPlan, before: Mapping[PciAddress, bool], observe: Observe, run: Run
) -> tuple[Reason, ...]:
    """Roll back the functions that a change has touched; `before` says which of them were on VFIO drivers."""
    run.change.roll_back()
    state = observe()
    state = replace(state, pods=run.change.allocations(state.pods))
    back = plan_return(state, plan.unit, before)
    if back.refusals or not back.steps:
        return back.refusals
    record = _record(change_host, state)
    with _despite_errors():
        record.begin(back)
    failed = _carry_out(change_host, state, back, run.report, run)
    if failed is None:
        with _despite_errors():
            record.settle(back)
        return back.left_driverless
    return (failed.reason,)


def _unrecorded(change_host: ChangeHost, plan: DriverPlan, error: OSError) -> Reason:
    return nodeproblems.journal_not_written(plan.unit, change_host.original_drivers, str(error))


@contextmanager
def _despite_errors() -> Iterator[None]:
    """Roll back even if the journal can't be written: it has had the change as started since before its first step.

    So the next agent, or the next change, completes or undoes steps that were not recorded as done.
    """
    try:
        yield
    except OSError as error:
        # unknown: the change stays recorded as started
        log.warning("the driver journal can't be written, so the change stays recorded as started: %s", error)


def _record(change_host: ChangeHost, state: UnitState) -> ChangeRecord:
    return ChangeRecord(
        change_host.kernel, change_host.original_drivers, state.inventory.facts.functions, state.journal
    )
