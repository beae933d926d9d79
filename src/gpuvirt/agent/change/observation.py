"""Observes the host for the plans of changes: GPUs, vGPUs, drivers and modules, processes, allocations to pods."""

import uuid
from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.change.changehost import ChangeHost, Inputs
from gpuvirt.agent.change.typenames import learn_names
from gpuvirt.agent.store import hostfiles
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import GRACE_DRIVER, FunctionKind, PciFunction
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.tools import ToolError, Tools
from gpuvirt.hardware.functions import modules
from gpuvirt.hardware.host import platform
from gpuvirt.hardware.programs.smireport import read_report
from gpuvirt.hardware.scan import scan, scan_some, with_device_ids, with_users
from gpuvirt.hardware.usage import hostuse, nativeusers
from gpuvirt.model.allocation.tenancy import FormerTenants
from gpuvirt.model.change.desired import DesiredUnit, DesiredVgpus, desired_drivers
from gpuvirt.model.change.driverplanning import unmet
from gpuvirt.model.change.nativedrivers import HEADS, alias_of, best_vfio_driver, is_loaded, native_modules
from gpuvirt.model.change.state import Account, UnitState
from gpuvirt.model.change.vgpus import modes
from gpuvirt.model.change.vgpus.gpustate import GpuState, gpu_state_of, host_namespace, with_report
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Seen
from gpuvirt.model.reasons.shortfalls import KUBELET
from gpuvirt.paths import HostPath

MACHINE_ID = HostPath("/etc/machine-id")


def read_native_modules(
    kernel: Kernel, aliases: str, functions: Collection[PciFunction]
) -> Mapping[PciAddress, tuple[str, ...]]:
    """Return the native drivers that match functions, by driver name if loaded; empty without modules.alias."""
    found = native_modules(aliases, functions) if aliases else {}
    return {
        address: tuple(name for module in named for name in modules.loaded_as(kernel, module) or (module,))
        for address, named in found.items()
    }


def to_load(
    functions: Iterable[PciFunction],
    recorded: Mapping[PciAddress, str],
    native: Mapping[PciAddress, tuple[str, ...]],
    drivers: frozenset[str],
) -> set[str]:
    """Return the modules that may have to be loaded before functions can get their native drivers."""
    found: set[str] = set()
    for function in functions:
        names = (*filter(None, [recorded.get(function.address)]), *native.get(function.address, ()))
        if names and not is_loaded(drivers, names[0]):
            found |= {names[0], *([alias_of(function)] if native.get(function.address) else [])}
    return found


def missing(tools: Tools, desired: Iterable[str]) -> Mapping[str, str]:
    """Return the modules that modprobe can't load, with its error."""
    found: dict[str, str] = {}
    for module in sorted(desired):
        try:
            tools.demand_module(module)
        except ToolError as error:
            found[module] = str(error)
    return found


class Learned(msgspec.Struct, frozen=True):
    """Facts of a GPU that a change has learned from its own steps, and that no observation shows."""

    refused: Mapping[PciAddress, Seen] = msgspec.field(default_factory=dict)
    """VFs that have refused a vGPU type, with the kernel's error."""
    remembered: Mapping[VgpuId, VgpuType] = msgspec.field(default_factory=dict)
    """vGPUs from before the change: new vGPUs of their types get their ids."""
    in_use: Mapping[VgpuId, str] = msgspec.field(default_factory=dict)
    """vGPUs that could not be leased, with their users as far as the kernel showed them."""


NOTHING = Learned()


class HostObservation(msgspec.Struct, frozen=True):
    """One observation of a host."""

    change_host: ChangeHost
    inputs: Inputs
    inventory: Inventory
    account: Account
    namespace: uuid.UUID
    learned: Mapping[PciAddress, Learned] = msgspec.field(default_factory=dict)
    """The facts that the change has learned, by GPU."""

    def gpu_state(self, gpu: PciAddress) -> GpuState | None:
        """Return the state of a GPU's vGPUs, None if no driver on it can create vGPUs now."""
        state = gpu_state_of(self.inventory, gpu, self.account.holdings, self.namespace)
        if state is None:
            return None
        learned = self.learned.get(gpu, NOTHING)
        taken = dict.fromkeys(self.account.offered, (KUBELET,)) | {
            vgpu: (user,) for vgpu, user in learned.in_use.items()
        }
        host = state.host
        for parent, seen in learned.refused.items():
            host = host.with_refusal(parent, seen.text) if parent in host.creatable else host
        remembered = {**learned.remembered, **state.remembered}
        return replace(state, host=host, users={**taken, **state.users}, remembered=remembered)

    def asked_state(self, gpu: PciAddress, vgpus: DesiredVgpus) -> GpuState | None:
        """Return the same state with nvidia-smi's report, if the desired vGPUs need it. nvidia-smi takes seconds."""
        state, function = self.gpu_state(gpu), self.inventory.facts.functions[gpu]
        asked = modes.questions(function, state, vgpus) if state is not None else None
        if state is None or asked is None or not asked.blocks:
            return state
        report = read_report(self.change_host.tools, gpu, types=asked.types, scheduler=asked.scheduler)
        return with_report(state, function, report)

    def vgpu_state(self, vgpus: Mapping[PciAddress, DesiredVgpus]) -> UnitState:
        """Return the state that plans of these GPUs' vGPUs need."""
        states = {gpu: self.asked_state(gpu, target) for gpu, target in vgpus.items()}
        boot_id = self.inventory.facts.platform.boot_id
        tenancies = self.change_host.read_tenancies(boot_id)
        return UnitState(
            self.inventory,
            frozenset(),
            pods=self.account.pods,
            journal=hostfiles.journal(self.change_host.original_drivers).value.of_boot(boot_id),
            unmapped=self.account.allocations.unmapped,
            gpu_states={gpu: state for gpu, state in states.items() if state is not None},
            whole=self.account.allocations.functions,
            unknown=self.account.allocations.unknown,
            former=FormerTenants(tenancies, self.inputs.require_reset),
        )

    def unit_state(self, desired: DesiredUnit) -> UnitState:
        """Return the state that a plan toward the desired state needs."""
        present = {gpu: target for gpu, target in desired.items() if gpu in self.inventory.facts.functions}
        vgpus = {gpu: target.vgpus for gpu, target in present.items() if target.vgpus is not None}
        state = self.vgpu_state(vgpus)
        drivers = desired_drivers(present)
        gpus = {gpu: driver for gpu, driver in drivers.items() if gpu in self.inventory.gpus}
        is_met = len(gpus) == len(drivers) and not unmet(self.inventory, gpus, state.journal)
        is_met &= not self.inputs.allowed  # a GPU on VFIO may still wait for such a function of its group
        return state if is_met else self.with_drivers(state, drivers)

    def with_drivers(self, state: UnitState, gpus: Collection[PciAddress]) -> UnitState:
        """Return a state with all that plans of drivers need, for the isolation units of these GPUs."""
        kernel, facts = self.change_host.kernel, self.inventory.facts
        units = (members for members in self.inventory.units.values() if not set(gpus).isdisjoint(members))
        functions = [facts.functions[member] for members in units for member in members]
        aliases = modules.read_aliases(kernel)
        drivers = modules.loaded_drivers(kernel)
        built_in = GRACE_DRIVER in drivers  # then it is not in modules.alias
        best = {
            gpu.address: GRACE_DRIVER if built_in and gpu.needs_grace_driver else best_vfio_driver(aliases, gpu)
            for gpu in functions
            if gpu.kind is FunctionKind.GPU
        }
        addresses = [function.address for function in functions]
        away = [
            function
            for function in functions
            if (function.on_vfio or function.is_idle) and function.kind is not FunctionKind.BRIDGE
        ]
        native = read_native_modules(kernel, aliases, away)
        needed = to_load(away, state.journal.drivers, native, drivers)
        return replace(
            state,
            drivers=drivers,
            best_drivers=best,
            host_uses=hostuse.read_host_uses(kernel, functions),
            native_users=nativeusers.read_native_users(kernel, addresses),
            native_modules=native,
            missing_modules=missing(self.change_host.tools, needed),
            pinned=platform.read_pins(kernel, addresses),
            driver_may_come=self.inputs.driver_may_come,
            allowed=self.inputs.allowed,
            grace_without_driver=self.inputs.grace_without_driver or self.inputs.forced,
            forced=self.inputs.forced,
        )

    def host_state(self, vgpus: Mapping[PciAddress, DesiredVgpus] | None = None) -> UnitState:
        """Return the state that plans need of the drivers of all GPUs and NVSwitches, and of these GPUs' vGPUs."""
        functions = self.inventory.facts.functions
        heads = [address for address, function in functions.items() if function.kind in HEADS]
        return self.with_drivers(self.vgpu_state(vgpus or {}), heads)


def observe(change_host: ChangeHost, inputs: Inputs, named: Collection[PciAddress] | None = ()) -> HostObservation:
    """Observe the whole host, including the open files of all processes.

    The host hides the names of vGPU types of which it can't create another. nvidia-smi is asked for them on the GPUs
    in `named`, or on all GPUs if `named` is None. The inputs of the observation have the names.
    """
    return _observed(change_host, inputs, scan(change_host.kernel), named)


def observe_unit(
    change_host: ChangeHost, inputs: Inputs, unit: UnitId, before: Inventory, named: Collection[PciAddress] = ()
) -> HostObservation:
    """Observe one isolation unit; the facts of all others are those of `before`."""
    return _observed(
        change_host, inputs, scan_some(change_host.kernel, frozenset(before.units.get(unit, ())), before.facts), named
    )


def _observed(
    change_host: ChangeHost, inputs: Inputs, facts: Facts, named: Collection[PciAddress] | None
) -> HostObservation:
    facts = with_device_ids(change_host.kernel, with_users(change_host.kernel, facts))
    inputs = replace(inputs, type_names=learn_names(change_host.tools, facts, inputs.type_names, named))
    inventory = build_inventory(facts, inputs.type_names)
    return HostObservation(change_host, inputs, inventory, inputs.account(inventory), namespace_of(change_host.kernel))


def namespace_of(kernel: Kernel) -> uuid.UUID:
    """Return the namespace of the ids of this host's vGPUs, which follows from its machine id."""
    found = attributes.text(kernel, MACHINE_ID)
    return host_namespace(found if isinstance(found, str) else "")
