"""The removals that no test notices, each with the reason why the statement is no guard, or why its loss is harmless.

Where a guard protects against harm, it has a test instead of a line here. A line without its statement fails.
"""

from collections.abc import Mapping

UNNOTICED: Mapping[str, str] = {
    "node.change.driverphase: _put_back: back.refusals [or in] if back.refusals or not back.steps": "A plan with refusals has no steps, so the other part of the condition is true as well.",
    "node.change.driverphase: _put_back: not back.steps [or in] if back.refusals or not back.steps": "A rollback without steps records and takes nothing.",
    "node.change.gate.gate: Gate._locked: raise self.busy(unit, slot)": "The lock of the slot refuses it, too, 0.2 s later: locks belong to the open file, not to the process.",
    "node.change.gate.gate: Gate._refuse_unless_allocatable: isinstance(found, GateRecord) [and in] if isinstance(found, GateRecord) and found.state is Gate…": "A damaged record then raises AttributeError, which refuses the allocation as well.",
    "node.change.gate.gatefiles: GateFiles.state: is_locked [and in] if is_locked and (not has_owner)": "The lock of an open gate is tried twice then. A change that begins in between shows as blocked for one look, instead of as settling, and both refuse allocations.",
    "node.change.gate.gatefiles: GateFiles.state: not has_owner [and in] if is_locked and (not has_owner)": "The lock of a gate with an owner is tried twice then, and the second try is the newer one.",
    "node.change.gate.gates: Gates.plugin: raise GateFailedError(path, error) from error": "`open_file` refuses the first lock in a folder that could not be made, with the same error.",
    "node.change.steps.changes: Changes.allocate: self.under_way [and in] if self.under_way and (reason := self._why_closed(targets)) is not None": "Without changes under way, none of them covers a device; the condition saves a walk.",
    "node.change.steps.driverexecutor: _expect_native: isinstance(found, str) [and in] if isinstance(found, str) and (found in VFIO_DRIVERS or (vfio a…": "A driver that could not be read is refused either way, only with another text.",
    "node.change.steps.vgpusteps: take_all: raise [in] except InUseError": "No other step leases a group or searches for its users, and nothing else raises InUseError.",
    "model.offers.allocationcheck: _identity_change: was is not None [and in] if was is not None and function is not None and (function.id != was.id)": "An offered device is among the functions of the inventory that it was offered from.",
    "model.offers.allocationcheck: _vgpu_change: function is None [or in] if device.framework is not Framework.VENDOR_VFIO or function is None": "The next line fails for a parent that is gone, which refuses the allocation as well.",
    "node.allocation.allocator: Allocator._offered: inventory is None [or in] if inventory is None or offer is None": "Offers are made from an inventory, which is never unset, so a resource with an offer has an inventory.",
    "model.offers.allocationcheck: _node_changes: function is not None [and in] if function is not None and function.cdevs != was.cdevs": "A member that has left its group keeps its entry without the group (`DeviceReading._read_members`), and a carrier that is gone is refused before.",
    "model.schedules.faults: _time_faults: yield reasons.phase_unreachable(phase.name, phase.start)": "No line is known that cronsim takes and that has no start in its 50 years; `_line_faults` finds days that no month has.",
    "model.change.vgpus.instances: too_many: gpu_state.card is not None [and in] if gpu_state.card is not None and len(place(gpu_state.card,…": "`needed_instances` returns none for an unknown card, and no instances always find their places.",
    "node.ondemand.ondemandallocator: OnDemandAllocator._created: raise RefusedError(refusals.changing(entry.device, None))": "The new vGPU was added to the inventory a line before, with its group, so that it is always found there.",
}
