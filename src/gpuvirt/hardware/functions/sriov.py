"""Switches the VFs of a GPU on and off, with NVIDIA's `sriov-manage` or the kernel's `sriov_numvfs`.

Switching off removes VFs even while a process uses them. In both directions `sriov-manage` unbinds the GPU from its
driver for a moment: that removes all mediated devices and switches mixed sizes off, and GPU instances and the
scheduler's state may be lost. So both take the proof that no process uses the GPU or its VFs.
"""

import msgspec

from gpuvirt.errors import VfsUnchangedError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA, Unread
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof
from gpuvirt.hardware.access.tools import Program, ToolMissingError, Tools
from gpuvirt.hardware.functions import pci

NOT_NEEDED = ""
"""The reason where `sriov-manage` is not needed."""


def read_total(kernel: Kernel, gpu: PciAddress) -> int | Unread | None:
    """Return how many VFs a function supports, None where it has no SR-IOV."""
    return attributes.parsed(kernel, pci.attribute(gpu, "sriov_totalvfs"), attributes.number)


def count_vfs(kernel: Kernel, gpu: PciAddress) -> int | Unread:
    """Return how many VFs a function has, from its links, since reading `sriov_numvfs` takes the device's lock."""
    names = attributes.names(kernel, device_path(gpu))
    if isinstance(names, Unread):
        return names
    return sum(name.startswith("virtfn") for name in names or ())


def create_vfs(kernel: Kernel, gpu: PciAddress, count: int) -> None:
    """Switch `count` VFs of a function on that has none; raise OSError as the kernel does.

    ERANGE: the function supports fewer VFs. EBUSY: the function has another number of VFs, which must be removed first.
    ENOENT: the function has no driver, or one that does not support this, as NVIDIA's (drivers/pci/iov.c).
    """
    kernel.write(pci.attribute(gpu, "sriov_numvfs"), str(count).encode())


def remove_vfs(kernel: Kernel, gpu: PciAddress, proof: Proof) -> None:
    """Switch all VFs of a function off by `sriov_numvfs`; raise OSError as `create_vfs` does."""
    proof.spend(gpu)
    kernel.write(pci.attribute(gpu, "sriov_numvfs"), b"0")


class VfSwitch(msgspec.Struct, frozen=True):
    """How the VFs of a GPU are switched."""

    gpu: PciAddress
    count: int
    """The number of VFs afterwards; 0: none."""
    by_nvidia: bool
    """Whether NVIDIA's `sriov-manage` switches them where it is installed: it locks the GPU by its driver first."""


def switch_on(kernel: Kernel, gpu: PciAddress, count: int | None = None) -> VfSwitch:
    """Return how `count` VFs of a GPU are switched on, by default as many as it supports.

    `sriov-manage` can only do the latter. Raises VfsUnchangedError where the GPU has no SR-IOV.
    """
    total = read_total(kernel, gpu)
    if not isinstance(total, int):
        found = total.detail if isinstance(total, Unread) else "it has no SR-IOV"
        raise VfsUnchangedError(f"no VFs were switched on at {gpu}: {pci.attribute(gpu, 'sriov_totalvfs')}: {found}")
    desired = total if count is None else count
    return VfSwitch(gpu, desired, desired == total and _is_nvidias(kernel, gpu))


def switch_off(kernel: Kernel, gpu: PciAddress) -> VfSwitch:
    """Return how all VFs of a GPU are switched off; raise VfsUnchangedError where its vendor is unknown."""
    return VfSwitch(gpu, 0, _is_nvidias(kernel, gpu))


def switch_vfs(kernel: Kernel, tools: Tools, switch: VfSwitch, proof: Proof) -> None:
    """Switch the VFs of a GPU on or off. The proof is that of the GPU and its VFs.

    Raises ToolError, OSError as `create_vfs` does, and VfsUnchangedError where the GPU does not have the VFs
    afterwards.
    """
    missing = _why_not_managed(tools) if switch.by_nvidia else NOT_NEEDED
    proof.spend(switch.gpu)
    if missing is None:
        tools.sriov_manage(switch.gpu, enable=switch.count > 0)
    else:
        try:
            kernel.write(pci.attribute(switch.gpu, "sriov_numvfs"), str(switch.count).encode())
        except FileNotFoundError as error:
            if missing == NOT_NEEDED:
                raise
            raise VfsUnchangedError(
                f"{missing}; and the driver of {switch.gpu} does not accept a number of VFs: {error.strerror}"
                f" ({error.filename})"
            ) from error
    # sriov-manage succeeds without effect on a card that it does not support.
    vfs = count_vfs(kernel, switch.gpu)
    if vfs != switch.count:
        count = f"{vfs} VFs" if isinstance(vfs, int) else vfs.detail
        raise VfsUnchangedError(
            f"{device_path(switch.gpu)}/virtfn*: {count}; expected {switch.count}. See the kernel's log"
        )


def _is_nvidias(kernel: Kernel, gpu: PciAddress) -> bool:
    found = pci.read_id(kernel, gpu)
    if isinstance(found, Unread):
        raise VfsUnchangedError(f"the vendor of {gpu} is unknown: {found.path}: {found.detail}")
    return found is not None and found.vendor == NVIDIA


def _why_not_managed(tools: Tools) -> str | None:
    """Return why `sriov-manage` can't run; None if it can."""
    try:
        tools.demand(Program.SRIOV_MANAGE)
    except ToolMissingError as error:
        return str(error)
    return None
