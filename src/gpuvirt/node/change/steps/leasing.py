"""Leases devices before they are unbound or removed, so that no VM can open them meanwhile."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from gpuvirt.errors import DeviceBusyError, GpuvirtError, LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.usage.users import GROUP_CLASS, read_users
from gpuvirt.model.reasons import Reason, Seen, refusals


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
    return Seen(str(error.filename), str(error.strerror)) if isinstance(error, OSError) else Seen("", str(error))


@dataclass(frozen=True, slots=True)
class Claim:
    """The IOMMU group to lease."""

    subject: str
    """The device that reasons name: the address of a function, or the id of a vGPU."""
    group: IommuGroup
    cdevs: tuple[str, ...]
    """The VFIO device nodes of the group's devices, such as `vfio3`."""


@contextlib.contextmanager
def leased(kernel: Kernel, claim: Claim) -> Iterator[None]:
    """Lease an IOMMU group while the context lasts, and verify that no process has one of its devices open.

    Raises HeldError if a process uses the group. Raises RefusedError if the group can't be leased and the processes
    that use it can't be read either.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_hold(kernel, claim))
        except DeviceBusyError as error:
            raise InUseError(refusals.not_leased(claim.subject, str(error)), str(error)) from error
        except LeaseUnavailableError as error:
            _verify_unused(kernel, claim, str(error))
        else:
            # A VM that is about to start has a device open that is not bound yet: a lease does not detect that.
            _verify_unused(kernel, claim, None)
        yield


@contextlib.contextmanager
def _hold(kernel: Kernel, claim: Claim) -> Iterator[None]:
    """Lease a group by its group node, or by the nodes of its devices where the kernel has no group nodes."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(kernel.lease(claim.group))
        except LeaseUnavailableError:
            # A lease by a device's own node resets the device, and a VM that is about to bind it would fail.
            _verify_unused(kernel, claim, None)
            held.enter_context(kernel.lease_devices(claim.cdevs))
        yield


def _verify_unused(kernel: Kernel, claim: Claim, lease_problem: str | None) -> None:
    """Search all processes for users of a group; raise HeldError.

    `lease_problem` is why the group could not be leased, None if it is leased. Without a lease the search must be able
    to find every user, else this raises RefusedError.
    """
    found = read_users(kernel, dict.fromkeys(claim.cdevs, claim.group))
    if isinstance(found, Unread):
        if lease_problem is not None:
            unread = Seen(found.path, found.detail)
            raise RefusedError(refusals.users_unseen(claim.subject, Seen("", lease_problem), unread))
        return
    if lease_problem is not None and claim.group not in found.watched:
        absent = Seen.absent(f"{GROUP_CLASS}/{claim.group}/dev")
        raise RefusedError(refusals.users_unseen(claim.subject, Seen("", lease_problem), absent))
    ours = kernel.pids
    others = [user for user in (*found.by_group.get(claim.group, ()), *found.of_lost_nodes) if user.pid not in ours]
    if others:
        raise InUseError(refusals.in_use(claim.subject, others, forcible=False), refusals.named(others))
