"""Makes the proofs that nobody uses a device, each inside the step that writes, as the last read before the write.

`leasing` makes those of VFIO devices. Whatever can't be read refuses. No other module makes a proof
(`tools/check_proofs.py`), so a step that takes a device from its users can't be written without one.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from time import monotonic  # noqa: TID251  a proof's age

from gpuvirt.agent.change.steps.leasing import GroupClaim, RefusedError, verify_unused, what_failed
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import VFIO_DRIVERS, PciFunction, Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof, ProofKind
from gpuvirt.hardware.functions import modules
from gpuvirt.hardware.usage.nativeusers import read_native_users
from gpuvirt.hardware.usage.users import Users, cdevs_of, read_users
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, refusals
from gpuvirt.paths import HostPath

NVIDIA_DRIVER = "nvidia"
"""The driver that answers NVIDIA's own tools, and that has `unbindLock`."""


def unbind_lock(address: PciAddress) -> HostPath:
    """Return the file by which NVIDIA's driver accepts no more clients, so that a GPU can be unbound."""
    return HostPath(f"/proc/driver/nvidia/gpus/{address}/unbindLock")


def walked(
    kernel: Kernel, functions: Collection[PciAddress], *, answered: bool = False, forcible: bool = False
) -> Proof:
    """Prove that no process has a node of functions with native drivers open or mapped; raise RefusedError.

    `answered`: NVIDIA's driver answers for NVIDIA's own services, since NVIDIA's tool takes the step. `forcible`:
    whether the reason names `--force`.
    """
    since_s = monotonic()
    # A program may map a device and close its descriptor: mappings cost as much again, so scans leave them out.
    found = read_native_users(kernel, functions, mapped=True)
    if isinstance(found, Unread):
        raise RefusedError(refusals.users_unseen(min(functions), Seen(found.path, found.detail)))
    for function in functions:
        users = found.get(function, ())
        if answered:
            users = refusals.serious(users)
        if users:
            raise RefusedError(refusals.in_use(function, users, forcible=forcible))
    return Proof(ProofKind.WALK, functions, since_s=since_s)


def vgpus_walked(kernel: Kernel, gpu: PciAddress, claims: Sequence[GroupClaim]) -> Proof:
    """Prove that no process has one of a GPU's vGPUs open, for a step that changes all of them; raise RefusedError."""
    since_s = monotonic()
    if claims:
        verify_unused(kernel, claims, "the step needs no lease")
    return Proof(ProofKind.WALK, (gpu,), since_s=since_s)


def driver_answers(kernel: Kernel, gpu: PciAddress, step: str) -> Proof:
    """Prove that NVIDIA's driver has a GPU: it answers NVIDIA's tool, which fails where the GPU is in use.

    Raises RefusedError where the GPU has another driver. There is no walk for an instance: nvidia-vgpu-mgr has the GPU
    open for each VM.
    """
    expect_driver(kernel, gpu, NVIDIA_DRIVER, step)
    return Proof(ProofKind.DRIVER, (gpu,))


def driverless(
    kernel: Kernel, functions: Mapping[PciAddress, PciFunction], address: PciAddress, step: str, *, unbound_here: bool
) -> Proof:
    """Prove that a function has no driver, that no unbind of it is under way, and that no process has one of its VFs.

    The link to the driver goes before the kernel waits for the device's users. `unbound_here`: this change has unbound
    the function and the unbind has returned, so none is under way. A native driver may reset the VFs of its function.
    """
    function, since_s = functions[address], monotonic()
    vfs = [_read_function(functions, vf) for vf in function.virtfns]
    if vfs or not unbound_here:
        _verify_no_vfio_users(kernel, function, vfs, unbound_here=unbound_here)
    expect_driver(kernel, address, None, step)
    return Proof(ProofKind.DRIVERLESS, (address,), since_s=since_s)


def _read_function(functions: Mapping[PciAddress, PciFunction], vf: PciAddress) -> PciFunction:
    if (found := functions.get(vf)) is None:
        raise RefusedError(refusals.unread_function(vf))
    return found


def _verify_no_vfio_users(
    kernel: Kernel, function: PciFunction, vfs: Sequence[PciFunction], *, unbound_here: bool
) -> None:
    """Verify that no process has a VF, or a VFIO device that may be the function; raise RefusedError."""
    found = read_users(kernel, cdevs_of(vfs))
    if isinstance(found, Unread):
        raise RefusedError(refusals.users_unseen(function.address, Seen(found.path, found.detail)))
    for vf in vfs:
        if users := _users_of(kernel, found, vf):
            raise RefusedError(refusals.in_use(vf.address, users, forcible=False))
    lost = [user for user in found.of_lost_nodes if user.pid not in kernel.pids]
    if not unbound_here and (users := [*_users_of(kernel, found, function), *lost]):
        raise RefusedError(refusals.unbind_pending(function.address, users, certain=False))


def _users_of(kernel: Kernel, users: Users, function: PciFunction) -> list[OpenDeviceUser]:
    """Return the processes that have a function's group open; raise RefusedError if the group is not known."""
    group = function.iommu_group
    if isinstance(group, Unread):
        raise RefusedError(refusals.unread(function.address, group))
    found = users.by_group.get(group, ()) if group is not None else ()
    return [user for user in found if user.pid not in kernel.pids]


def forced(kernel: Kernel, address: PciAddress, driver: str, step: str) -> Proof:
    """Return the proof of an admin's order to take a function from the users of its native driver.

    Raises RefusedError where the function has another driver by now, or a VFIO device: a VM is never forced.
    """
    names = attributes.names(kernel, device_path(address, "vfio-dev"))
    if isinstance(names, Unread):
        raise RefusedError(refusals.unread(address, names))
    if driver in VFIO_DRIVERS or names:
        raise RefusedError(refusals.failed(step, address, Seen(device_path(address, "vfio-dev"), f"{driver}, VFIO")))
    expect_driver(kernel, address, driver, step)
    return Proof(ProofKind.FORCED, (address,))


@contextlib.contextmanager
def locked(kernel: Kernel, address: PciAddress) -> Iterator[Proof | None]:
    """Keep new clients out of NVIDIA's driver for a GPU; the driver agrees to that only while it has no clients.

    The context value is the proof; None from a driver without this lock. A GPU that keeps its driver is unlocked at the
    end. A GPU that loses its driver loses the lock with it. Raises RefusedError.
    """
    lock = unbind_lock(address)
    try:
        kernel.write(lock, b"1")
    except OSError as error:
        if error.errno not in attributes.ABSENT:
            raise RefusedError(refusals.failed("lock", address, what_failed(error))) from error
        yield None
        return  # unknown: nothing, the driver has no such lock
    # While a client has the GPU open, the driver leaves 0, and reports no error.
    if attributes.text(kernel, lock) != "1":
        clients = read_native_users(kernel, [address])
        known = () if isinstance(clients, Unread) else clients.get(address, ())  # unknown: refused anyway
        raise RefusedError(
            Reason(
                ReasonCode.DRIVER_LOCK,
                address,
                "can't be released: the NVIDIA driver still has"
                f" clients{f': {refusals.named(known)}' if known else ''}",
                (Seen(f"/proc/driver/nvidia/gpus/{address}/unbindLock", "stays 0"),),
                "stop the clients, including nvidia-persistenced and DCGM",
            )
        )
    proof = Proof(ProofKind.DRIVER, (address,), lasting=True)
    try:
        yield proof
    finally:
        proof.end()
        if modules.driver_of(kernel, address) == NVIDIA_DRIVER:
            with contextlib.suppress(OSError):  # unknown: the driver stays locked, and admits no client
                kernel.write(lock, b"0")


def expect_driver(kernel: Kernel, address: PciAddress, driver: str | None, step: str) -> None:
    """Verify that a function has a driver, or none; raise RefusedError."""
    found = modules.driver_of(kernel, address)
    if isinstance(found, Unread):
        raise RefusedError(refusals.unread(address, found))
    if found != driver:
        bound, expected = (f"driver {name}" if name is not None else "no driver" for name in (found, driver))
        link = device_path(address, "driver")
        raise RefusedError(refusals.failed(step, address, Seen(link, f"{bound}; expected: {expected}")))
