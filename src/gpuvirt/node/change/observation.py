"""Observes the host for the plans of changes: GPUs, vGPUs, drivers, users, and what pods have."""

import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import FunctionKind, Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware import attributes, driverctl, hostuse, modules, nativeusers
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.nvidiasmi import read_supported
from gpuvirt.hardware.scan import scan, scan_some, with_device_ids, with_users
from gpuvirt.hardware.smireport import read_report
from gpuvirt.hardware.tools import ToolError, Tools
from gpuvirt.model.change.desired import DesiredUnit, DesiredVgpus, desired_drivers
from gpuvirt.model.change.drivers import unmet
from gpuvirt.model.change.modalias import FALLBACK, best_vfio_driver
from gpuvirt.model.change.nativedrivers import HEADS
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.vgpus import modes
from gpuvirt.model.change.vgpus.gpustate import GIVER, GpuState, gpu_state_of, host_namespace, with_report
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Seen
from gpuvirt.node.change import nativemodules
from gpuvirt.node.change.inputs import Account, Inputs
from gpuvirt.node.change.site import Site
from gpuvirt.node.store import originaldrivers
from gpuvirt.paths import HostPath

MACHINE_ID = HostPath("/etc/machine-id")


@dataclass(frozen=True, slots=True)
class Learned:
    """What a change has learned of a GPU by trying, and no observation shows."""

    refused: Mapping[PciAddress, Seen] = field(default_factory=dict)
    """VFs that have just refused a type, with what they said."""
    remembered: Mapping[VgpuId, VgpuType] = field(default_factory=dict)
    """vGPUs that were there when the change began: they come back with their ids if any of their types are created."""
    in_use: Mapping[VgpuId, str] = field(default_factory=dict)
    """vGPUs for which no lease could be had: by whom they are used, as far as the kernel said it."""


NOTHING = Learned()


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation of a host."""

    site: Site
    inputs: Inputs
    inventory: Inventory
    account: Account
    namespace: uuid.UUID
    learned: Mapping[PciAddress, Learned] = field(default_factory=dict)
    """What a change has learned, by GPU."""

    def gpu_state(self, gpu: PciAddress) -> GpuState | None:
        """Return the state of a GPU's vGPUs, None where nothing on it makes any now."""
        state = gpu_state_of(self.inventory, gpu, self.account.holdings, self.namespace)
        if state is None:
            return None
        learned = self.learned.get(gpu, NOTHING)
        taken = dict.fromkeys(self.account.offered, (GIVER,)) | {one: (who,) for one, who in learned.in_use.items()}
        host = state.host
        for slot, seen in learned.refused.items():
            host = host.with_refusal(slot, seen.text) if slot in host.slots else host
        missing = {one: had for one, had in learned.remembered.items() if one not in state.leaving}
        return replace(state, host=host, users={**taken, **state.users}, remembered={**missing, **state.remembered})

    def asked_state(self, gpu: PciAddress, vgpus: DesiredVgpus) -> GpuState | None:
        """Return the same with what nvidia-smi says, where the desired vGPUs need that; this takes seconds then."""
        state, function = self.gpu_state(gpu), self.inventory.facts.functions[gpu]
        asked = modes.questions(function, state, vgpus) if state is not None else None
        if state is None or asked is None:
            return state
        report = read_report(self.site.tools, gpu, types=asked.types, scheduler=asked.scheduler)
        return with_report(state, function, report)

    def vgpu_state(self, vgpus: Mapping[PciAddress, DesiredVgpus]) -> UnitState:
        """Return all that plans of these GPUs' vGPUs follow from."""
        states = {gpu: self.asked_state(gpu, target) for gpu, target in vgpus.items()}
        return UnitState(
            self.inventory,
            frozenset(),
            pods=self.account.pods,
            journal=originaldrivers.read(self.site.original_drivers).of_boot(self.inventory.facts.platform.boot_id),
            unmapped=self.account.allocations.unmapped,
            gpu_states={gpu: state for gpu, state in states.items() if state is not None},
            whole=self.account.allocations.functions,
            unknown=self.account.allocations.unknown,
        )

    def unit_state(self, desired: DesiredUnit) -> UnitState:
        """Return all that a plan toward what is desired follows from."""
        there = {gpu: target for gpu, target in desired.items() if gpu in self.inventory.facts.functions}
        vgpus = {gpu: target.vgpus for gpu, target in there.items() if target.vgpus is not None}
        state = self.vgpu_state(vgpus)
        drivers = desired_drivers(there)
        gpus = {gpu: driver for gpu, driver in drivers.items() if gpu in self.inventory.gpus}
        is_met = len(gpus) == len(drivers) and not unmet(self.inventory, gpus, state.journal)
        return state if is_met else self.with_drivers(state, drivers)

    def with_drivers(self, state: UnitState, gpus: Collection[PciAddress]) -> UnitState:
        """Return a state with all that the drivers of the units of these GPUs follow from."""
        kernel, facts = self.site.kernel, self.inventory.facts
        units = (members for members in self.inventory.units.values() if not set(gpus).isdisjoint(members))
        functions = [facts.functions[member] for members in units for member in members]
        aliases = modules.read_aliases(kernel)
        best = {one.address: best_vfio_driver(aliases, one) for one in functions if one.kind is FunctionKind.GPU}
        addresses = [one.address for one in functions]
        drivers = modules.loaded_drivers(kernel)
        away = [one for one in functions if (one.on_vfio or one.is_idle) and one.kind is not FunctionKind.BRIDGE]
        native = nativemodules.read_native_modules(kernel, aliases, away)
        to_load = nativemodules.to_load(away, state.journal.drivers, native, drivers)
        return replace(
            state,
            drivers=drivers,
            best_drivers={address: driver for address, driver in best.items() if driver != FALLBACK},
            host_uses=hostuse.read_host_uses(kernel, functions),
            native_users=nativeusers.read_native_users(kernel, addresses) if facts.users is not None else None,
            native_modules=native,
            missing_modules=nativemodules.missing(self.site.tools, to_load),
            pinned=driverctl.read_pins(kernel, addresses),
            driver_may_come=self.inputs.driver_may_come,
            allowed=self.inputs.allowed,
            forced=self.inputs.forced,
        )

    def host_state(self, vgpus: Mapping[PciAddress, DesiredVgpus] | None = None) -> UnitState:
        """Return all that plans of the drivers of all GPUs and NVSwitches follow from, and of these GPUs' vGPUs."""
        functions = self.inventory.facts.functions
        heads = [address for address, function in functions.items() if function.kind in HEADS]
        return self.with_drivers(self.vgpu_state(vgpus or {}), heads)


def observe(site: Site, inputs: Inputs, named: Collection[PciAddress] | None = ()) -> Observation:
    """Observe the whole host; this walks through all processes.

    nvidia-smi is asked for the names of vGPU types that the host names no more, on the GPUs that are `named`, or on all
    with None.
    """
    return _observed(site, inputs, scan(site.kernel), named)


def observe_unit(
    site: Site, inputs: Inputs, unit: UnitId, before: Inventory, named: Collection[PciAddress] = ()
) -> Observation:
    """Observe one unit as it is now; other units are as they were before."""
    return _observed(site, inputs, scan_some(site.kernel, frozenset(before.units.get(unit, ())), before.facts), named)


def _observed(site: Site, inputs: Inputs, facts: Facts, named: Collection[PciAddress] | None) -> Observation:
    facts = with_device_ids(site.kernel, with_users(site.kernel, facts))
    inventory = build_inventory(facts, inputs.type_names)
    if names := _told_names(site.tools, inventory, named):
        inventory = build_inventory(facts, {**inputs.type_names, **names})
    return Observation(site, inputs, inventory, inputs.account(inventory), namespace_of(site.kernel))


def _told_names(tools: Tools, inventory: Inventory, gpus: Collection[PciAddress] | None) -> Mapping[str, VgpuType]:
    """Return what nvidia-smi calls the types that VFs carry and none of them names any more, by the host's ids."""
    unnamed = {
        vgpu.gpu
        for vgpu in inventory.vgpus.values()
        if vgpu.framework is Framework.VENDOR_VFIO and isinstance(vgpu.live.type, Unread) and vgpu.live.type_id
        if gpus is None or vgpu.gpu in gpus
    }
    names: dict[str, VgpuType] = {}
    for gpu in sorted(unnamed):
        with suppress(ToolError):  # then they stay unread, and nothing is planned from them
            found = read_supported(tools, gpu)
            names |= {str(known.id): known.name for known in found} if not isinstance(found, Unread) else {}
    return names


def namespace_of(kernel: Kernel) -> uuid.UUID:
    """Return what the ids of this host's vGPUs follow from."""
    found = attributes.text(kernel, MACHINE_ID)
    return host_namespace(found if isinstance(found, str) else "")
