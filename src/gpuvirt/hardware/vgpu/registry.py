"""The back ends of all vGPU frameworks."""

from collections.abc import Mapping

from gpuvirt.errors import VgpuUnavailableError
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost, host_of_vfs, vf_type
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof
from gpuvirt.hardware.functions import sriov
from gpuvirt.hardware.vgpu.backend import FoundVgpus, VgpuBackend
from gpuvirt.hardware.vgpu.mdev import Mdev
from gpuvirt.hardware.vgpu.vendor_vfio import VendorVfio


class SriovVf:
    """Creates and removes all VFs of a GPU of AMD or Intel at once, which split it evenly.

    PCI Express has one switch for all VFs of a function, and the drivers of these vendors share the GPU among all VFs
    that are switched on. So a single VF cannot be added, and all VFs have the same size. Each VF then is a function of
    its own, which is bound to a VFIO driver and offered as such. Scans therefore do not report these vGPUs; plans take
    them from `facts.vgpu.host_of_vfs`. Neither vendor's driver has been tested here.
    """

    framework = Framework.SRIOV_VF

    def probe(
        self,
        kernel: Kernel,  # noqa: ARG002  the functions have all that is needed
        functions: Mapping[PciAddress, PciFunction],
        before: Mapping[PciAddress, VgpuHost],  # noqa: ARG002
        /,
        *,
        brief: bool,  # noqa: ARG002
    ) -> FoundVgpus | Unread:
        """Return the GPUs that have VFs or support them."""
        hosts = {address: host_of_vfs(function) for address, function in functions.items()}
        return FoundVgpus({address: host for address, host in hosts.items() if host is not None})

    def create(self, kernel: Kernel, parent: PciAddress, type_: VgpuType, vgpu: VgpuId) -> None:
        """Switch all VFs of a GPU on at once; raise OSError as the kernel does, VgpuUnavailableError."""
        total = sriov.read_total(kernel, parent)
        if str(vgpu) != parent:
            raise VgpuUnavailableError(f"the set of VFs of {parent} has its address as its id; found {vgpu}")
        if not isinstance(total, int):
            raise VgpuUnavailableError(
                f"{parent} has no SR-IOV: sriov_totalvfs: {'missing' if total is None else total.detail}"
            )
        count = next((count for count in range(1, total + 1) if vf_type(count) == type_), None)
        if count is None:
            raise VgpuUnavailableError(f"{parent} cannot be split into {type_!r}; expected 1 VF to {vf_type(total)}")
        sriov.create_vfs(kernel, parent, count)

    def verify_same(self, kernel: Kernel, live: LiveVgpu) -> None:
        """Raise VgpuUnavailableError where the GPU has another number of VFs by now."""
        count = sriov.count_vfs(kernel, live.parent)
        found = count.detail if isinstance(count, Unread) else vf_type(count) if count else "no VFs"
        if found != live.type:
            raise VgpuUnavailableError(f"{live.parent} has {found}; expected {live.type}, so no VF was removed")

    def remove(self, kernel: Kernel, live: LiveVgpu, proof: Proof) -> None:
        """Switch all VFs of a GPU off at once; raise OSError as the kernel does."""
        sriov.remove_vfs(kernel, live.parent, proof)


SCANNED: tuple[VgpuBackend, ...] = (Mdev(), VendorVfio())
"""The back ends that a scan calls; VFs that split a GPU are found as PCI functions."""

BACKENDS: tuple[VgpuBackend, ...] = (*SCANNED, SriovVf())


def backend_of(framework: Framework) -> VgpuBackend:
    """Return the back end that creates and removes vGPUs of a framework."""
    return next(backend for backend in BACKENDS if backend.framework is framework)
