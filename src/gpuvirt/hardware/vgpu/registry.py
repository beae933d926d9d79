"""All ways of carrying vGPUs that gpuvirt knows."""

from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.vgpu.backend import VgpuBackend
from gpuvirt.hardware.vgpu.mdev import Mdev
from gpuvirt.hardware.vgpu.sriov_vf import SriovVf
from gpuvirt.hardware.vgpu.vendor_vfio import VendorVfio

LOOKED_FOR: tuple[VgpuBackend, ...] = (Mdev(), VendorVfio())
"""Those whose vGPUs a look at the host finds; VFs that split a GPU are found as the functions that they are."""

BACKENDS: tuple[VgpuBackend, ...] = (*LOOKED_FOR, SriovVf())


def backend_of(framework: Framework) -> VgpuBackend:
    """Return what makes vGPUs of a framework and takes them away."""
    return next(backend for backend in BACKENDS if backend.framework is framework)
