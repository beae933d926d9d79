"""VFs of a GPU, switched on and off: by NVIDIA's `sriov-manage`, or by the kernel's `sriov_numvfs`.

Switching off takes the VFs from whoever uses them, and `sriov-manage` takes the GPU itself from its driver for a
moment, either way: with it go all mediated devices and mixed-size mode, and nobody is to count on GPU instances and the
scheduler's state. That nobody uses the GPU or its VFs is for the caller to see, under a lease, before that.
"""

from gpuvirt.errors import VfsUnchangedError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA, Unread
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware import attributes, pci
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.tools import ToolMissingError, Tools

NOT_ITS_WORK = ""
"""Why NVIDIA's program is not missed."""


def read_total(kernel: Kernel, gpu: PciAddress) -> int | Unread | None:
    """Return how many VFs a function could have; None where it has no SR-IOV."""
    return attributes.parsed(kernel, pci.attribute(gpu, "sriov_totalvfs"), attributes.number)


def count_vfs(kernel: Kernel, gpu: PciAddress) -> int | Unread:
    """Return how many VFs a function has, by its links: reading `sriov_numvfs` takes the device's lock."""
    names = attributes.names(kernel, device_path(gpu))
    if isinstance(names, Unread):
        return names
    return sum(name.startswith("virtfn") for name in names or ())


def write_count(kernel: Kernel, gpu: PciAddress, count: int) -> None:
    """Switch VFs on, or with 0 all of them off; raise OSError as the kernel does.

    ERANGE: more than it could have; EBUSY: it has others, which must go first; ENOENT: no driver has it, or one that
    does not let VFs be made this way, as NVIDIA's (drivers/pci/iov.c).
    """
    kernel.write(pci.attribute(gpu, "sriov_numvfs"), str(count).encode())


def enable_vfs(kernel: Kernel, tools: Tools, gpu: PciAddress, count: int | None = None) -> None:
    """Switch a GPU's VFs on: `count`, or as many as it could have; `sriov-manage` knows of all alone.

    Raises ToolError, OSError as `write_count` does, and VfsUnchangedError where they are not there afterwards.
    """
    total = read_total(kernel, gpu)
    if not isinstance(total, int):
        found = total.said if isinstance(total, Unread) else "it has no SR-IOV"
        raise VfsUnchangedError(f"no VFs were switched on at {gpu}: {pci.attribute(gpu, 'sriov_totalvfs')}: {found}")
    desired = total if count is None else count
    missing = _missing(kernel, tools, gpu, enable=True) if desired == total else NOT_ITS_WORK
    if missing is not None:
        _write(kernel, gpu, desired, missing)
    _expect(kernel, gpu, desired)


def disable_vfs(kernel: Kernel, tools: Tools, gpu: PciAddress) -> None:
    """Switch all of a GPU's VFs off, which the caller has seen that nobody uses; raise as `enable_vfs` does."""
    missing = _missing(kernel, tools, gpu, enable=False)
    if missing is not None:
        _write(kernel, gpu, 0, missing)
    _expect(kernel, gpu, 0)


def _missing(kernel: Kernel, tools: Tools, gpu: PciAddress, *, enable: bool) -> str | None:
    """Let NVIDIA's program do it; return why it did not, None when it did. Of other vendors' GPUs it is not asked."""
    found = pci.read_id(kernel, gpu)
    if isinstance(found, Unread):
        raise VfsUnchangedError(f"whose GPU {gpu} is can't be told: {found.path}: {found.said}")
    if found is None or found.vendor != NVIDIA:
        return NOT_ITS_WORK
    try:
        tools.sriov_manage(gpu, enable=enable)
    except ToolMissingError as error:
        return str(error)
    return None


def _write(kernel: Kernel, gpu: PciAddress, count: int, missing: str) -> None:
    """Write the kernel's attribute; where there is none, say what else should have done it."""
    try:
        write_count(kernel, gpu, count)
    except FileNotFoundError as error:
        if missing == NOT_ITS_WORK:
            raise
        raise VfsUnchangedError(
            f"{missing}; and its driver takes no count: {error.strerror} ({error.filename})"
        ) from error


def _expect(kernel: Kernel, gpu: PciAddress, count: int) -> None:
    """See that the VFs are there: `sriov-manage` ends well on a card that it does not know, and does nothing."""
    found = count_vfs(kernel, gpu)
    if found != count:
        seen = f"{found} VFs" if isinstance(found, int) else found.said
        raise VfsUnchangedError(f"{device_path(gpu)}/virtfn*: {seen}; expected {count}. See the kernel's log")
