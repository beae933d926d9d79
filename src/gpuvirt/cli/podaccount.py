"""The allocations of a host's devices to pods, for commands: from the kubelet and the agent's ledger."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, monotonic  # noqa: TID251  the gate's

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.change.gate.gaterecord import AccountReading
from gpuvirt.agent.known import nokubelet, snapshot
from gpuvirt.agent.kubelet.hostaccount import AccountUnknownError, answers, read_account
from gpuvirt.agent.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.agent.store.agentstate import read_history
from gpuvirt.clock import RealClock
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import VgpuId
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.usage.nativeusers import read_node
from gpuvirt.hardware.usage.processes import read_kubelet_start, read_kubelets
from gpuvirt.model.allocation.allocations import Consumers, Unknown
from gpuvirt.model.allocation.ledger import (
    UNSETTLED,
    Entry,
    KubeletAccount,
    Ledger,
    SettledAt,
    allocations_of,
    settle,
    timed,
)
from gpuvirt.model.allocation.podallocations import Allocation, PodAllocations, map_allocations
from gpuvirt.model.change.state import Account
from gpuvirt.model.change.vgpus.gpustate import Holding, holdings_of
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, Seen, refusals
from gpuvirt.paths import HostRoots, KubeletPaths


class AllocationReader(msgspec.Struct, frozen=True):
    """Reads the allocations at each call: they may change between a command's start and its lock of a unit."""

    kernel: Kernel
    roots: HostRoots
    kubelet: KubeletPaths
    ledgers: tuple[Path, ...]
    assume_unallocated: bool = False
    """Whether to assume that no device is allocated beyond the known ones where the kubelet can't be read."""

    read: list[AccountReading] = msgspec.field(default_factory=list)
    """The complete readings of the kubelet's accounts so far."""

    def readings(self) -> Sequence[AccountReading]:
        """Read the kubelet's accounts once more; return all readings, the newest last."""
        settled_s, (held, unknown) = self._settled_s(), self._by_kubelet()
        if unknown is None or self.assume_unallocated:
            self.read.append(AccountReading(monotonic(), frozenset(device for _, device in held or {}), settled_s))
        return tuple(self.read)

    def _settled_s(self) -> SettledAt:
        """Return the time before which the kubelet has recorded all its allocations: when the one that runs has begun.

        The one before it has lost the answers to Allocate that it had not recorded.
        """
        started_s = read_kubelet_start(self.kernel, now_s := monotonic(), clock_gettime(CLOCK_BOOTTIME))
        is_hidden = started_s == now_s and answers(self.kubelet.pod_resources_socket)
        return UNSETTLED if is_hidden else SettledAt(started_s)

    def account(self, inventory: Inventory) -> Account:
        """Return the allocations of a host's devices."""
        allocations, ledger, entries = self._read(inventory)
        lost = [entry for entry in entries if (vgpu := entry.target.vgpu) is not None and vgpu not in inventory.vgpus]
        same_boot = ledger.boot_id == snapshot.boot_id(self.kernel)
        holdings = (*_holdings(inventory, allocations), *holdings_of(lost, same_boot=same_boot))
        known = allocations.by_gpu(inventory)
        pods = known if allocations.unknown is None else Unknown(allocations.unknown, known)
        return Account(pods, allocations, holdings)

    def _read(self, inventory: Inventory) -> tuple[PodAllocations, Ledger, tuple[Entry, ...]]:
        at, at_s, settled_s = RealClock().now(), monotonic(), self._settled_s()
        held, unknown = self._by_kubelet()
        try:
            ledger = snapshot.load_ledger(*self.ledgers)
        except (OSError, DamagedError) as error:
            ledger, unknown = snapshot.EMPTY, unknown or _unknown(f"the agent's ledger: {error}")
        entries = timed(ledger.entries, at_s)
        boot_ids = {ledger.boot_id, snapshot.boot_id(self.kernel)}
        if len(boot_ids) > 1 and None not in boot_ids:  # times of another boot say nothing
            entries = tuple(replace(entry, earlier_boot=True) for entry in entries)
        if held is not None and unknown is None:  # an entry counts until the kubelet must have recorded it
            account = KubeletAccount(at, at_s, held, settled_s=settled_s)
            entries = settle(settle(entries, account), account)
        by_ledger = {(entry.resource, entry.device): entry.allocated_to for entry in entries}
        allocations = [
            Allocation(*key, allocated_to) for key, allocated_to in by_ledger.items() if key not in (held or {})
        ]
        allocations += allocations_of(held or {})
        unknown = None if self.assume_unallocated else unknown
        return map_allocations(inventory, allocations, unknown, ledger.rules), ledger, entries

    def _by_kubelet(self) -> tuple[Consumers | None, Reason | None]:
        """Return the kubelet's allocations, None without a kubelet, and the reason if they are incomplete."""
        try:
            boot_id = snapshot.boot_id(self.kernel)
            history = read_history(self.ledgers, boot_id)
            find_kubelet = partial(nokubelet.prove, self.kernel)
            recorded = RecordedAllocations(
                self.kubelet, partial(read_node, self.kernel), history, boot_id, find_kubelet=find_kubelet
            )
            return read_account(recorded, read_kubelets(self.kernel)), None
        except AccountUnknownError as error:
            return error.known, _unknown(str(error))


def _unknown(error: str) -> Reason:
    return refusals.allocations_unknown(
        "a device of this host", Seen("", error), by_hand=True, is_root=os.geteuid() == 0
    )


def _holdings(inventory: Inventory, allocations: PodAllocations) -> Iterator[Holding]:
    for vgpu, pods in allocations.vgpus.items():
        live = inventory.vgpus[vgpu].live
        vgpu_type = None if isinstance(live.type, Unread) else live.type
        for pod in pods:
            yield Holding(inventory.vgpus[vgpu].gpu, vgpu, vgpu_type, pod, seen_this_boot=True)
    for address, pods in allocations.functions.items():
        for pod in pods if VgpuId(address) not in allocations.vgpus else ():
            yield Holding(address, VgpuId(address), None, pod, seen_this_boot=True)
