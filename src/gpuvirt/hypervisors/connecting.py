"""Opens connections to hypervisors; `apps` injects it into the controller."""

from gpuvirt.clock import Clock
from gpuvirt.hypervisors.connection import ChildHypervisor, start_order
from gpuvirt.model.schedules.connection import Credentials, HypervisorKind, MayCallUntil
from gpuvirt.model.schedules.hypervisor import Hypervisor


async def open_hypervisor(
    kind: HypervisorKind, credentials: Credentials, clock: Clock, may_call_until_s: MayCallUntil
) -> Hypervisor:
    """Return a connection, whose child starts with the first request. Never raises: errors are answers."""
    return ChildHypervisor(start_order(kind, credentials), clock, may_call_until_s)
