"""Calls that change a VM of a host with libvirt."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic  # noqa: TID251  how long to wait for a call, in a process of its own

import libvirt

from gpuvirt.hypervisors.backend import BackEndError
from gpuvirt.hypervisors.libvirt.faults import problem_of
from gpuvirt.hypervisors.libvirt.reading import is_moving
from gpuvirt.hypervisors.libvirt.running import Running, RunningCall, is_open
from gpuvirt.hypervisors.libvirt.session import Session
from gpuvirt.hypervisors.messages import Problem
from gpuvirt.model.schedules.hypervisor import Action, Call, VmKey

FAILS_WITHIN_S = 2.0
"""How long a call is watched that libvirt has begun. What it refuses, and a QEMU that does not start, fail earlier."""
POLL_S = 0.1
FIXED_TYPE = "the type of a vGPU is that of its mediated device, which libvirt does not change"
CALLS: Mapping[Action, Callable[[libvirt.virDomain], object]] = {
    Action.SUSPEND: libvirt.virDomain.managedSave,
    Action.SHUT_DOWN: libvirt.virDomain.shutdown,
    Action.POWER_OFF: libvirt.virDomain.destroy,
    Action.START: libvirt.virDomain.create,
}
"""What makes each call; only a guest's shutdown is answered at once."""


def make(session: Session, running: Running, call: Call) -> None:
    """Make a call; raises BackEndError. Return when it is done, or runs for some time without failing.

    A call that failed after that is reported in the place of the next same one: the disk of a host that is full shows
    when much of a VM's memory is written, and nobody would see it otherwise.
    """
    ask = CALLS.get(call.action)
    if ask is None:
        raise BackEndError(Problem.REFUSED, FIXED_TYPE, is_certain=True)
    if (failure := running.failure(call)) is not None:
        raise BackEndError(failure.problem, f"the last one failed: {failure.text}", is_certain=True)
    connection = session.opened()
    try:
        domain = connection.lookupByUUIDString(call.vm)
    except libvirt.libvirtError as error:
        raise problem_of(error, is_certain=True, is_alive=is_open(connection)) from error
    begun = running.begin(call, connection, partial(ask, domain))
    try:
        _watch(session, begun, call)
    except BackEndError as error:
        raise _in_wrong_power(error, domain, call.action) from error


def _watch(session: Session, begun: RunningCall, call: Call) -> None:
    """Wait for a call's end, or until the VM shows that libvirt has begun it.

    Nothing else says that libvirt has received it. What is never received ends with the child, when its time is over.
    """
    until_s = monotonic() + FAILS_WITHIN_S
    while not begun.ends_within(POLL_S):
        if monotonic() < until_s:
            continue
        with suppress(BackEndError):  # the connection of the call itself says what has become of it
            if session.run(lambda connection: _has_begun(connection, call.vm, call.action)):
                return


def _has_begun(connection: libvirt.virConnect, key: VmKey, action: Action) -> bool:
    domain = connection.lookupByUUIDString(key)
    if action is Action.START:
        return bool(domain.isActive())
    return not domain.isActive() or is_moving(domain)


def _in_wrong_power(error: BackEndError, domain: libvirt.virDomain, action: Action) -> BackEndError:
    """Return a refusal as what it is where the VM is already on or off: libvirt has one code for all refusals."""
    if error.problem is Problem.REFUSED:
        with suppress(libvirt.libvirtError):
            is_on = bool(domain.isActive())
            if is_on is (action is Action.START):
                text = f"{error.text}; the VM is {'on' if is_on else 'off'}"
                return BackEndError(Problem.WRONG_POWER, text, is_certain=True)
    return error
