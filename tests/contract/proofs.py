"""Destructive writes with proofs of tests, which know that nobody uses the devices."""

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import LiveVgpu, Scheduler
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof, ProofKind
from gpuvirt.hardware.access.tools import Tools
from gpuvirt.hardware.functions import sriov
from gpuvirt.hardware.programs import vgpuscheduler
from gpuvirt.hardware.vgpu.backend import VgpuBackend


def free(*devices: str) -> Proof:
    """Return a proof for one write."""
    return Proof(ProofKind.FORCED, devices)


def enable_vfs(kernel: Kernel, tools: Tools, gpu: PciAddress, count: int | None = None) -> None:
    """Switch VFs of a GPU on."""
    sriov.switch_vfs(kernel, tools, sriov.switch_on(kernel, gpu, count), free(gpu))


def disable_vfs(kernel: Kernel, tools: Tools, gpu: PciAddress) -> None:
    """Switch the VFs of a GPU off."""
    sriov.switch_vfs(kernel, tools, sriov.switch_off(kernel, gpu), free(gpu))


def remove(backend: VgpuBackend, kernel: Kernel, live: LiveVgpu) -> None:
    """Remove a vGPU."""
    backend.verify_same(kernel, live)
    backend.remove(kernel, live, free(live.id))


def set_scheduler(tools: Tools, gpu: PciAddress, desired: Scheduler) -> None:
    """Set the scheduler of a GPU's vGPUs."""
    vgpuscheduler.set_scheduler(tools, gpu, desired, vgpuscheduler.read_arguments(tools, desired), free(gpu))
