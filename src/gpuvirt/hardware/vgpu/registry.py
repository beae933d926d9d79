"""The back ends of all vGPU frameworks."""

from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.vgpu.backend import VgpuBackend
from gpuvirt.hardware.vgpu.mdev import Mdev
from gpuvirt.hardware.vgpu.sriov_vf import SriovVf
from gpuvirt.hardware.vgpu.vendor_vfio import VendorVfio

SCANNED: tuple[VgpuBackend, ...] = (Mdev(), VendorVfio())
"""The back ends that a scan calls; VFs that split a GPU are found as PCI functions."""

BACKENDS: tuple[VgpuBackend, ...] = (*SCANNED, SriovVf())


def backend_of(framework: Framework) -> VgpuBackend:
    """Return the back end that creates and removes vGPUs of a framework."""
    return next(backend for backend in BACKENDS if backend.framework is framework)
