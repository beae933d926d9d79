"""Switches the VFs of a GPU on and off, with NVIDIA's `sriov-manage` or the kernel's `sriov_numvfs`.

Switching off removes VFs even while a process uses them. In both directions `sriov-manage` unbinds the GPU from its
driver for a moment: that removes all mediated devices and switches mixed sizes off, and GPU instances and the
scheduler's state may be lost. So the caller makes sure, under a lease, that no process uses the GPU or its VFs.
"""

from gpuvirt.errors import VfsUnchangedError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA, Unread
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.tools import ToolMissingError, Tools
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


def write_count(kernel: Kernel, gpu: PciAddress, count: int) -> None:
    """Switch `count` VFs on, or with 0 all VFs off; raise OSError as the kernel does.

    ERANGE: the function supports fewer VFs. EBUSY: the function has another number of VFs, which must be removed first.
    ENOENT: the function has no driver, or one that does not support this, as NVIDIA's (drivers/pci/iov.c).
    """
    kernel.write(pci.attribute(gpu, "sriov_numvfs"), str(count).encode())


def enable_vfs(kernel: Kernel, tools: Tools, gpu: PciAddress, count: int | None = None) -> None:
    """Switch `count` VFs of a GPU on, by default as many as it supports; `sriov-manage` can only do the latter.

    Raises ToolError, OSError as `write_count` does, and VfsUnchangedError where the GPU does not have the VFs
    afterwards.
    """
    total = read_total(kernel, gpu)
    if not isinstance(total, int):
        found = total.detail if isinstance(total, Unread) else "it has no SR-IOV"
        raise VfsUnchangedError(f"no VFs were switched on at {gpu}: {pci.attribute(gpu, 'sriov_totalvfs')}: {found}")
    desired = total if count is None else count
    missing = _missing(kernel, tools, gpu, enable=True) if desired == total else NOT_NEEDED
    if missing is not None:
        _write(kernel, gpu, desired, missing)
    _expect(kernel, gpu, desired)


def disable_vfs(kernel: Kernel, tools: Tools, gpu: PciAddress) -> None:
    """Switch all VFs of a GPU off, after the caller has checked that no process uses them; raise as `enable_vfs`."""
    missing = _missing(kernel, tools, gpu, enable=False)
    if missing is not None:
        _write(kernel, gpu, 0, missing)
    _expect(kernel, gpu, 0)


def _missing(kernel: Kernel, tools: Tools, gpu: PciAddress, *, enable: bool) -> str | None:
    """Run `sriov-manage` for a GPU of NVIDIA; return None when it has run, otherwise the reason why not."""
    found = pci.read_id(kernel, gpu)
    if isinstance(found, Unread):
        raise VfsUnchangedError(f"the vendor of {gpu} is unknown: {found.path}: {found.detail}")
    if found is None or found.vendor != NVIDIA:
        return NOT_NEEDED
    try:
        tools.sriov_manage(gpu, enable=enable)
    except ToolMissingError as error:
        return str(error)
    return None


def _write(kernel: Kernel, gpu: PciAddress, count: int, missing: str) -> None:
    """Write `sriov_numvfs`; where the write is not supported, raise VfsUnchangedError with the `missing` program."""
    try:
        write_count(kernel, gpu, count)
    except FileNotFoundError as error:
        if missing == NOT_NEEDED:
            raise
        raise VfsUnchangedError(
            f"{missing}; and the driver of {gpu} does not accept a number of VFs: {error.strerror} ({error.filename})"
        ) from error


def _expect(kernel: Kernel, gpu: PciAddress, count: int) -> None:
    """Check the number of VFs: `sriov-manage` succeeds without effect on a card that it does not support."""
    found = count_vfs(kernel, gpu)
    if found != count:
        seen = f"{found} VFs" if isinstance(found, int) else found.detail
        raise VfsUnchangedError(f"{device_path(gpu)}/virtfn*: {seen}; expected {count}. See the kernel's log")
