"""The guards of the shipped code, each with its replacement when it is removed: exploration must detect the removal."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from msgspec.structs import replace

from gpuvirt.agent.allocation import allocator
from gpuvirt.agent.change import driverphase
from gpuvirt.agent.change.allocationgate import AllocationGate, DevicesBySlot
from gpuvirt.agent.change.gate import drainrequest, gate, gaterecord
from gpuvirt.agent.change.gate.gate import Gates
from gpuvirt.agent.change.steps import changes, leasing, proving, vgpusteps
from gpuvirt.agent.change.steps.changerecord import ChangeRecord
from gpuvirt.agent.change.steps.changes import Change, Changes
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.agent.known import state
from gpuvirt.agent.known.tenancykeeper import TenancyKeeper
from gpuvirt.agent.kubelet import accountwatch, recordedallocations
from gpuvirt.agent.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.agent.reconcile.operands import Operands
from gpuvirt.agent.reconcile.podaccount import PodAccount
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Facts, FreshFacts
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof, ProofKind
from gpuvirt.hardware.devicefacts import AskedDevice, DeviceReading
from gpuvirt.model.allocation import allocateddevices, ledger, nodeledger
from gpuvirt.model.allocation.allocateddevices import AllocatedDevices
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.ledger import Entry, KubeletAccount
from gpuvirt.model.allocation.podallocations import PodAllocations, ResourceRules
from gpuvirt.model.allocation.tenancy import FormerTenants
from gpuvirt.model.change import driverplanning, planner
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.plan import Scope, VgpuPlan
from gpuvirt.model.change.state import DriverJournal, UnitState
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.node import decisions, picture
from gpuvirt.model.node import shares as nodeshares
from gpuvirt.model.node.memo import Memoized
from gpuvirt.model.node.parts import NodeAllocations, allocations_part
from gpuvirt.model.offers import withdrawal
from gpuvirt.model.reasons import ReasonCode
from tests.explore.claimscenarios import CLAIM_GUARDS
from tests.explore.guard import (
    DRAINED,
    DRAINS,
    GOES_ON,
    NEWEST,
    UNSETTLED,
    Guard,
    always,
    never,
    nothing,
    without_lease,
)
from tests.explore.ondemandguards import ON_DEMAND_GUARDS, RARELY_NOTICED
from tests.explore.rebootscenarios import REBOOT_GUARDS


def _none(*_: object, **__: object) -> tuple[object, ...]:
    return ()


def _only_if_listed(entry: Entry, account: KubeletAccount) -> Entry | None:
    return entry if (entry.resource, entry.device) in account.devices else None


def _no_holdings(*_: object, **__: object) -> tuple[object, ...]:
    return ()


def _without_holdings(_: object, entries: tuple[Entry, ...]) -> Memoized[NodeAllocations]:
    found = allocations_part(None, entries)
    return replace(found, value=replace(found.value, holdings=()))


def _unless_unknown(account: PodAccount) -> Unknown | None:
    return Unknown() if account._state.ledger.account is None else None


def _as_before(_: object, facts: Facts, asked: Sequence[AskedDevice]) -> FreshFacts:
    return FreshFacts(facts, users={device.group: () for device in asked if device.group is not None})


def _by_nobody(reading: DeviceReading, _: AskedDevice, group: IommuGroup) -> None:
    reading._users[group] = ()


def _as_planned(_: UnitState, plan: VgpuPlan) -> VgpuPlan:
    return plan


_is_elsewhere = driverplanning._is_elsewhere


def _unless_without_driver(
    inventory: Inventory, address: PciAddress, desired: DesiredDriver, journal: DriverJournal
) -> bool:
    is_idle = inventory.facts.functions[address].is_idle
    return not is_idle and _is_elsewhere(inventory, address, desired, journal)


_counted_by = withdrawal.counted_by


def _counted_if_answered(inventory: Inventory, account: KubeletAccount | None, rules: ResourceRules) -> object:
    found = _counted_by(inventory, account, rules)
    return PodAllocations() if isinstance(found, Unread) else found


def _unlocked(*_: object) -> "nullcontext[None]":
    return nullcontext()


def _without_lock(_: Kernel, address: PciAddress) -> "nullcontext[Proof]":
    return nullcontext(Proof(ProofKind.DRIVER, [address], lasting=True))


def _without_walk(_: Kernel, functions: Collection[PciAddress], **__: bool) -> Proof:
    return Proof(ProofKind.WALK, functions)


_OFFERS = (
    Guard(decisions, "withdrawn", lambda *_: frozenset[PciAddress](), ()),
    Guard(Changes, "closed", property(lambda _: Scope()), ()),
)
"""The agent does not list a device that is being changed or is about to be removed."""

_USERS = Guard(DeviceReading, "see_who_uses", _by_nobody, ())
"""Allocate checks the use of a device, and so finds the lease of a change, too."""

_RECORD = Guard(RecordedAllocations, "read", lambda _: dict[object, object](), ())
"""Allocate and each step of a change read the kubelet's record again."""

_PARTIAL = Guard(PodAccount, "_unknown", property(_unless_unknown), ())
"""A change waits while the kubelet's account is partial."""

_WITHDRAWN = Guard(state.NodeState, "observe_gates", lambda *_: False, (), (DRAINS,))
"""An agent withdraws what others change or drain, and allocates none of it."""


def _passed_or_failed(gate: AllocationGate, subject: str, devices: DevicesBySlot) -> AbstractContextManager[None]:
    try:
        return _passed(gate, subject, devices)
    except RefusedError as error:
        if error.reason.code is ReasonCode.GATE_FAILED:
            return nullcontext()
        raise


_passed = AllocationGate._passed

GUARDS: Mapping[str, Guard] = {
    "gates: those of an unprivileged plugin": Guard(
        Gates, "all", property(lambda gates: (gates.host,)), ("plugin-or-command",), (_WITHDRAWN, GOES_ON, NEWEST)
    ),
    "gates: what a plugin without gates lists": Guard(
        drainrequest, "_why_listed", nothing, ("older-plugin-or-command",), (NEWEST,)
    ),
    "gates: a file that fails refuses": Guard(
        AllocationGate,
        "_passed",
        _passed_or_failed,
        ("command-or-admission-with-EMFILE-of-gates",),
        (_USERS, NEWEST, GOES_ON, DRAINED),
    ),
    "gate: the newest account before each step": Guard(Change, "_ask_account", nothing, ("pod-of-another-plugin",)),
    "gate on disk: its lock": Guard(
        gate, "try_lock", always, ("command-or-admission",), (_USERS, NEWEST, DRAINS, GOES_ON)
    ),
    "gate on disk: allocations that no account shows yet": Guard(
        gate, "refuse_unsettled", nothing, ("command-after-the-agent",), (NEWEST,)
    ),
    "gate: no allocation of what a change may touch": Guard(
        Changes, "_why_closed", nothing, ("return-or-admission", "return-of-a-group"), (*_OFFERS, _USERS)
    ),
    "gate: no step on what is allocated by now": Guard(
        Change, "_why_allocated", nothing, ("return-or-admission",), _OFFERS
    ),
    "gate: no step of a plan that took too long": Guard(
        Change, "_why_expired", nothing, ("slow-change",), (Guard(Change, "_why_undesired", nothing, ()), NEWEST)
    ),
    "gate: no step of a plan that is no longer desired": Guard(Change, "_why_undesired", nothing, ("back-at-once",)),
    "lease: the group is held": Guard(leasing, "_hold", _unlocked, ("vm-by-hand",)),
    "lease: the walk through all processes": Guard(
        leasing, "verify_unused", nothing, ("vm-about-to-start-before-the-lease",)
    ),
    "executor: NVIDIA's unbindLock": Guard(proving, "locked", _without_lock, ("container-is-taken",)),
    "executor: the walk right before an unbind": Guard(
        proving, "walked", _without_walk, ("amdgpu-is-taken", "nvidia-beside-its-audio", "group-of-two-natives")
    ),
    "executor: the driver after a step is the expected one": Guard(
        driverphase._Taking, "_expect", nothing, ("driver-refuses-for-good",)
    ),
    "planning: pods": Guard(driverplanning, "_allocated", _none, ("known-pod-of-another-plugin",), (NEWEST,)),
    "planning: pods whose device is not found here": Guard(
        driverplanning, "unmapped_reasons", _none, ("pod-with-an-unknown-id",)
    ),
    "allocation check: devices are read again": Guard(
        allocator,
        "read_at_once",
        _as_before,
        ("neighbour-rebound-by-hand",),
        (Guard(allocator, "read_devices", _as_before, ()),),
    ),
    "allocation check: what was read is judged": Guard(
        allocator, "why_refused", nothing, ("neighbour-rebound-by-hand",)
    ),
    "allocation check: who uses the device": Guard(
        DeviceReading, "see_who_uses", _by_nobody, ("vm-by-hand-or-pod",), (_RECORD,)
    ),
    "allocation: a group is not given to two pods": Guard(
        AllocatedDevices, "conflict", nothing, ("two-pods-of-one-group",)
    ),
    "allocation: a device is not given under a second id": Guard(
        allocateddevices, "is_same_id", always, ("pods-of-kubevirts-plugin", "vgpus-of-kubevirts-plugin")
    ),
    "gate: new allocations without a device before each step": Guard(
        changes, "unmapped_reasons", _none, ("pods-of-an-unknown-plugin",)
    ),
    "account: pods of the checkpoint": Guard(
        recordedallocations,
        "_content",
        lambda *_: recordedallocations.CheckpointContent(),
        ("killed-without-ledger-or-api",),
        (_RECORD, _PARTIAL, UNSETTLED),
    ),
    "account: pods of the checkpoint that are gone": Guard(
        accountwatch, "without_gone", lambda _paths, in_file, _api: in_file, ("pod-ends",)
    ),
    "account: a checkpoint that was lost": Guard(
        RecordedAllocations, "judge", nothing, ("checkpoint-of-another-plugin-is-deleted",)
    ),
    "allocation: a device that the kubelet has forgotten": Guard(
        RecordedAllocations, "lost", lambda _: {}, ("checkpoint-is-deleted",)
    ),
    "account: what the kubelet counts is unread": Guard(
        withdrawal, "counted_by", _counted_if_answered, ("count-fails",)
    ),
    "ledger: pods that another agent has served": Guard(
        nodeledger, "adopt", lambda entries, *_: tuple(entries), ("group-after-restart",), (_RECORD,)
    ),
    "ledger: an allocation counts before the kubelet lists it": Guard(
        ledger, "_after", _only_if_listed, ("slow-neighbour-and-disk",)
    ),
    "ledger: no allocation ends before its admission is settled": Guard(
        ledger.Entry, "may_be_unrecorded", never, ("slow-neighbour-and-disk",)
    ),
    "gate on disk: no allocation ends before its admission is settled": Guard(
        gaterecord, "_is_settled", always, ("slow-neighbour-or-command",), (NEWEST,)
    ),
    "vGPUs: what pods have": Guard(
        picture,
        "holdings_of",
        _no_holdings,
        ("vgpus-in-use",),
        (
            Guard(decisions, "allocations_part", _without_holdings, ()),
            Guard(Change, "_why_allocated", nothing, ()),
            NEWEST,
        ),
    ),
    "planning: pods of vGPUs": Guard(planner, "_unless_allocated", _as_planned, ("vfs-of-a-pods-gpu",), (NEWEST,)),
    "vGPUs: what is held while one goes": Guard(vgpusteps, "leased", without_lease, ("vgpus-by-hand",)),
    "vGPUs: VFs are switched on below nobody": Guard(proving, "walked", _without_walk, ("vfs-of-a-used-gpu",)),
    "drivers: the record of a change before it is made": Guard(
        ChangeRecord, "begin", nothing, ("killed-during-a-change",)
    ),
    "drivers: a GPU without a driver is not as desired": Guard(
        driverplanning, "_is_elsewhere", _unless_without_driver, ("a-step-fails-on-the-way-back",)
    ),
    "tenants: no GPU with the memory of another tenant": Guard(
        FormerTenants, "why_withheld", nothing, ("memory-of-a-vm", "memory-of-a-container")
    ),
    "tenants: recorded before the answer of Allocate": Guard(
        TenancyKeeper, "give", nothing, ("memory-of-a-vm-after-a-kill",)
    ),
    "shares: all accounts but the API server's": Guard(
        nodeshares, "why_kept", lambda *_: {}, ("share-of-a-deleted-pod",)
    ),
    "vGPUs of another plugin: removed once it has ended, and its devices are not counted": Guard(
        Operands,
        "_why_waiting",
        nothing,
        ("neighbour-or-admission",),
        beside=(Guard(withdrawal.Withdrawal, "leaving", lambda *_: frozenset(), ()),),
    ),
    **ON_DEMAND_GUARDS,
    **REBOOT_GUARDS,
    **CLAIM_GUARDS,
    **RARELY_NOTICED,
    "drivers: what failed is put back": Guard(driverphase, "_put_back", _none, ("driver-refuses-for-good",)),
}
