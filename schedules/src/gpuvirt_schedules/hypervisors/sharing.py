"""The connections of one controller: schedules with the same hypervisor and account share one, and its child.

A child takes some 25 MiB and a session at the hypervisor, and each reading is of all VMs. A hundred schedules of one
vCenter may switch at once.
"""

from collections.abc import Iterable, Mapping

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.model.workers.connection import HypervisorCredentials, HypervisorKind, MayCallUntil
from gpuvirt.model.workers.hypervisor import Abilities, Answer, Call, Hypervisor, VmKey, VmsReading, VmsUnknown
from gpuvirt_schedules.hypervisors.connection import ChildHypervisor, start_order
from gpuvirt_schedules.hypervisors.messages import Start


class _Shared(msgspec.Struct):
    connection: ChildHypervisor
    users: int = 0


class SharedHypervisors:
    """The connections of one term as the leader, by hypervisor and credentials. The last user of one closes it."""

    def __init__(self) -> None:
        self._opened: dict[Start, _Shared] = {}

    async def open(
        self, kind: HypervisorKind, credentials: HypervisorCredentials, clock: Clock, may_call_until_s: MayCallUntil
    ) -> Hypervisor:
        """Return a connection, as `connection.open_hypervisor` does. Another password is another connection."""
        start = start_order(kind, credentials)
        shared = self._opened.setdefault(start, _Shared(ChildHypervisor(start, clock, may_call_until_s)))
        shared.users += 1
        return _User(self, start, shared.connection)

    async def release(self, start: Start) -> None:
        """Close a connection that nobody uses any more."""
        shared = self._opened[start]
        shared.users -= 1
        if not shared.users:
            del self._opened[start]
            await shared.connection.close()


class _User:
    """One schedule's use of a connection."""

    def __init__(self, owner: SharedHypervisors, start: Start, connection: ChildHypervisor) -> None:
        self._owner, self._start, self._connection = owner, start, connection
        self._is_closed = False

    async def read(self) -> VmsReading:
        """Return all VMs that the hypervisor shows to this user."""
        return await self._connection.read()

    async def call(self, call: Call) -> Answer:
        """Make one call."""
        return await self._connection.call(call, self)

    async def check(self, vms: Iterable[VmKey]) -> Mapping[VmKey, Abilities] | VmsUnknown:
        """Return the possible actions on each of these VMs."""
        return await self._connection.check(vms, self)

    async def close(self) -> None:
        """End this use; the child ends with the last one."""
        if not self._is_closed:
            self._is_closed = True
            await self._owner.release(self._start)
