"""What every way of carrying vGPUs can do for us."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import Oddity
from gpuvirt.facts.vgpu import Framework, VgpuHost
from gpuvirt.hardware.kernel import Kernel


@dataclass(frozen=True, slots=True)
class Probe:
    """What a back end has found."""

    hosts: Mapping[PciAddress, VgpuHost] = field(default_factory=dict)
    """By the address of the GPU."""
    oddities: tuple[Oddity, ...] = ()


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


def gpu_of(functions: Mapping[PciAddress, PciFunction], slot: PciAddress) -> PciAddress:
    """Return the GPU that a slot belongs to: itself, or the physical function behind a VF."""
    function = functions.get(slot)
    return function.physfn if function is not None and function.physfn is not None else slot
