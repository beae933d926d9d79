"""What every way of carrying vGPUs can do for us."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import MalformedEntry
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.hardware.kernel import Kernel


@dataclass(frozen=True, slots=True)
class Probe:
    """What a back end has found."""

    hosts: Mapping[PciAddress, VgpuHost] = field(default_factory=dict)
    """By the address of the GPU."""
    malformed_entries: tuple[MalformedEntry, ...] = ()


class VgpuBackend(Protocol):
    """One framework of vGPUs, seen from the host's files."""

    @property
    def framework(self) -> Framework:
        """The framework that this back end knows."""
        ...

    def probe(
        self,
        kernel: Kernel,
        functions: Mapping[PciAddress, PciFunction],
        before: Mapping[PciAddress, VgpuHost],
        /,
        *,
        brief: bool,
    ) -> Probe | Unread:
        """Return the GPUs that carry vGPUs this way; Unread when what exists can't be listed.

        `before` is what was found last. A brief look takes from there what each GPU could still carry.
        """
        ...

    def create(self, kernel: Kernel, slot: PciAddress, type_: VgpuType, vgpu: VgpuId) -> None:
        """Make a vGPU of a type on a function: one write to the kernel, and the reads right before it.

        `vgpu` is the id that it is to have: a UUID of the caller's choice for an mdev, the slot's own address for all
        others. Raises OSError as the kernel does; VgpuUnavailableError, and nothing was
        written, where the host does not offer that type there now. Leases and locks are the caller's.
        """
        ...

    def remove(self, kernel: Kernel, live: LiveVgpu) -> None:
        """Take a vGPU away: one write to the kernel, and the reads right before it.

        The caller holds the lease of its group: removing one in use is harm as soon as it is begun, and sleeps. Raises
        OSError as the kernel does; VgpuUnavailableError, and nothing was written, where another vGPU is in its place.
        """
        ...


def gpu_of(functions: Mapping[PciAddress, PciFunction], slot: PciAddress) -> PciAddress:
    """Return the GPU that a slot belongs to: itself, or the physical function behind a VF."""
    function = functions.get(slot)
    return function.physfn if function is not None and function.physfn is not None else slot
