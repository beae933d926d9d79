"""Leases VFIO devices, which proves that no VM uses them and keeps VMs from opening them meanwhile."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from time import monotonic  # noqa: TID251  a proof's age

import msgspec

from gpuvirt.errors import DeviceBusyError, GpuvirtError, LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof, ProofKind
from gpuvirt.hardware.usage.users import GROUP_CLASS, read_users
from gpuvirt.model.reasons import Reason, Seen, refusals

Prove = Callable[[], Proof]
"""Makes the proof for the write that follows; raises RefusedError if a process uses a device, or may use it."""


class RefusedError(GpuvirtError):
    """A step was not taken, or did not have its effect."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


class InUseError(RefusedError):
    """A device can't be leased, since a process uses it. The process was not disturbed."""

    def __init__(self, reason: Reason, who: str) -> None:
        super().__init__(reason)
        self.who = who


def what_failed(error: Exception) -> Seen:
    """Return the error of the kernel or a program, with the file that it is about."""
    if isinstance(error, OSError) and error.strerror is not None:
        return Seen(str(error.filename or ""), error.strerror)
    return Seen("", str(error))


class GroupClaim(msgspec.Struct, frozen=True):
    """The IOMMU group to lease."""

    subject: str
    """The device that reasons name: the address of a function, or the id of a vGPU."""
    group: IommuGroup
    cdevs: tuple[str, ...]
    """The VFIO device nodes of the group's devices, such as `vfio3`."""
    others: tuple[str, ...] = ()
    """The other devices of the group."""


@contextlib.contextmanager
def leased(kernel: Kernel, claim: GroupClaim) -> Iterator[Prove]:
    """Lease an IOMMU group while the context lasts, and verify that no process has one of its devices open.

    The context value makes the proof of the group's devices. Raises InUseError if a process uses the group. Raises
    RefusedError if the group can't be leased and the processes that use it can't be read either.
    """
    with contextlib.ExitStack() as held:
        problem: str | None = None
        try:
            held.enter_context(_hold(kernel, claim))
        except DeviceBusyError as error:
            reason = refusals.in_use(claim.subject, (), forcible=False, unseen=str(error))
            raise InUseError(reason, str(error)) from error
        except LeaseUnavailableError as error:
            problem = str(error)
        # A VM that is about to start has a device open that is not bound yet: a lease does not detect that.
        verify_unused(kernel, (claim,), problem)
        lease = Proof(ProofKind.LEASE, (claim.subject, *claim.others))
        held.callback(lease.end)
        yield (lambda: lease) if problem is None else lambda: _walk(kernel, claim, problem)


def _walk(kernel: Kernel, claim: GroupClaim, problem: str) -> Proof:
    """Prove by a walk that no process uses a group that can't be leased."""
    since_s = monotonic()
    verify_unused(kernel, (claim,), problem)
    return Proof(ProofKind.WALK, (claim.subject, *claim.others), since_s=since_s)


@contextlib.contextmanager
def _hold(kernel: Kernel, claim: GroupClaim) -> Iterator[None]:
    """Lease a group by its group node, or by the nodes of its devices where the kernel has no group nodes."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(kernel.lease(claim.group))
        except LeaseUnavailableError:  # unknown: the devices themselves are leased, or the error is raised
            if not claim.cdevs:  # a lease of no devices would hold nothing
                raise
            # A lease by a device's own node resets the device, and a VM that is about to bind it would fail.
            verify_unused(kernel, (claim,), None)
            held.enter_context(kernel.lease_devices(claim.cdevs))
        yield


def why_busy(kernel: Kernel, group: IommuGroup) -> str | None:
    """Open and close a group; return why that failed if a process has it open.

    The group is busy for a moment, so no pod may have a device of it.
    """
    try:
        with kernel.lease(group):
            return None
    except DeviceBusyError as error:
        return str(error)
    except LeaseUnavailableError:
        return None  # unknown: the change searches the processes, or refuses


def verify_unused(kernel: Kernel, claims: Sequence[GroupClaim], lease_problem: str | None) -> None:
    """Search all processes for users of groups; raise InUseError.

    `lease_problem` is why the groups are not leased, None if they are. Without a lease the search must be able to find
    every user, else this raises RefusedError.
    """
    cdevs = {name: claim.group for claim in claims for name in claim.cdevs}
    found = read_users(kernel, cdevs, mapped=lease_problem is not None)
    for claim in claims:
        if isinstance(found, Unread):
            if lease_problem is not None:
                unread = Seen(found.path, found.detail)
                raise RefusedError(refusals.users_unseen(claim.subject, Seen("", lease_problem), unread))
            continue
        if lease_problem is not None and claim.group not in found.watched:
            absent = Seen.absent(f"{GROUP_CLASS}/{claim.group}/dev")
            raise RefusedError(refusals.users_unseen(claim.subject, Seen("", lease_problem), absent))
        users = (*found.by_group.get(claim.group, ()), *found.of_lost_nodes)
        if others := [user for user in users if user.pid not in kernel.pids]:
            raise InUseError(refusals.in_use(claim.subject, others, forcible=False), refusals.named(others))
