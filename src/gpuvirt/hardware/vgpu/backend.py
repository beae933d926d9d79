"""The operations of a vGPU framework."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import MalformedEntry
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof


class FoundVgpus(msgspec.Struct, frozen=True):
    """The GPUs and vGPUs that a back end has found."""

    hosts: Mapping[PciAddress, VgpuHost] = msgspec.field(default_factory=dict)
    """By the address of the GPU."""
    malformed_entries: tuple[MalformedEntry, ...] = ()


class VgpuBackend(Protocol):
    """One vGPU framework, through the files of the host."""

    @property
    def framework(self) -> Framework:
        """The framework of this back end."""
        ...

    def probe(
        self,
        kernel: Kernel,
        functions: Mapping[PciAddress, PciFunction],
        before: Mapping[PciAddress, VgpuHost],
        /,
        *,
        brief: bool,
    ) -> FoundVgpus | Unread:
        """Return the GPUs with vGPUs of this framework; Unread when the vGPUs cannot be listed.

        `before` are the hosts of the last scan. A brief scan takes from there the vGPUs that each GPU could still
        carry.
        """
        ...

    def create(self, kernel: Kernel, parent: PciAddress, type_: VgpuType, vgpu: VgpuId) -> None:
        """Create a vGPU of a type on the function `parent`: one write, and the reads right before it.

        `vgpu` is the id of the vGPU: a UUID of the caller's choice for an mdev, the function's own address for all
        others. Raises OSError as the kernel does. Raises VgpuUnavailableError without a write where the host does not
        offer that type there now. The caller has the leases and locks.
        """
        ...

    def verify_same(self, kernel: Kernel, live: LiveVgpu) -> None:
        """Raise VgpuUnavailableError where another vGPU is in the place of this one by now."""
        ...

    def remove(self, kernel: Kernel, live: LiveVgpu, proof: Proof) -> None:
        """Remove a vGPU by one write, which `verify_same` precedes.

        The proof is that of the vGPU: removing one in use sleeps, and harms its VM at once. Raises OSError as the
        kernel does.
        """
        ...


def gpu_of(functions: Mapping[PciAddress, PciFunction], parent: PciAddress) -> PciAddress:
    """Return the GPU of a parent function: the function itself, or the physical function of a VF."""
    function = functions.get(parent)
    return function.physfn if function is not None and function.physfn is not None else parent
