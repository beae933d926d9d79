"""Holding what is about to be taken from its driver or removed, so that nobody can have it meanwhile."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from gpuvirt.errors import DeviceBusyError, GpuvirtError, LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.users import GROUP_CLASS, read_users
from gpuvirt.model.reasons import Reason, Seen, refusals


class RefusedError(GpuvirtError):
    """A step was not taken, or did not do what it should."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


class HeldError(RefusedError):
    """Somebody has what is to be held; they were not asked for it."""

    def __init__(self, reason: Reason, who: str) -> None:
        super().__init__(reason)
        self.who = who


def what_failed(error: Exception) -> Seen:
    """Return what the kernel or a program said, with the file that it was about."""
    return Seen(str(error.filename), str(error.strerror)) if isinstance(error, OSError) else Seen("", str(error))


@dataclass(frozen=True, slots=True)
class Claim:
    """What is to be held."""

    subject: str
    """What reasons are about: the address of a function, the id of a vGPU."""
    group: IommuGroup
    cdevs: tuple[str, ...]
    """The own nodes of the group's devices, `vfio3`."""


@contextlib.contextmanager
def leased(kernel: Kernel, claim: Claim) -> Iterator[None]:
    """Hold a group by its node, or where groups have none by those of its devices, and see that nobody has one open.

    Raises HeldError where somebody has, and RefusedError where nothing could be held nor anybody be looked for.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_hold(kernel, claim))
        except DeviceBusyError as error:
            raise HeldError(refusals.not_leased(claim.subject, str(error)), str(error)) from error
        except LeaseUnavailableError as error:
            _see_that_nobody_uses(kernel, claim, str(error))
        else:
            # A machine that is about to start has a device open that is not bound yet: no lease shows that.
            _see_that_nobody_uses(kernel, claim, None)
        yield


@contextlib.contextmanager
def _hold(kernel: Kernel, claim: Claim) -> Iterator[None]:
    """Hold a group by its node, or where groups have none by those of its devices."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(kernel.lease(claim.group))
        except LeaseUnavailableError:
            # To lease a device by its own node resets it, and a VM that is about to bind it would fail.
            _see_that_nobody_uses(kernel, claim, None)
            held.enter_context(kernel.lease_devices(claim.cdevs))
        yield


def _see_that_nobody_uses(kernel: Kernel, claim: Claim, said: str | None) -> None:
    """Look through all processes; where no lease could be had (`said`), the walk must be able to show a user."""
    found = read_users(kernel, dict.fromkeys(claim.cdevs, claim.group))
    if isinstance(found, Unread):
        if said is not None:
            raise RefusedError(refusals.users_unseen(claim.subject, Seen("", said), Seen(found.path, found.said)))
        return
    if said is not None and claim.group not in found.watched:
        raise RefusedError(
            refusals.users_unseen(claim.subject, Seen("", said), Seen.absent(f"{GROUP_CLASS}/{claim.group}/dev"))
        )
    ours = kernel.pids
    others = [user for user in (*found.by_group.get(claim.group, ()), *found.of_lost_nodes) if user.pid not in ours]
    if others:
        raise HeldError(refusals.in_use(claim.subject, others, forcible=False), refusals.named(others))
