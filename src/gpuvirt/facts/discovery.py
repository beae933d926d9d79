"""What a host shows to somebody who may only look: whether it has an NVIDIA GPU, and which system it runs."""

from dataclasses import dataclass

from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute


@dataclass(frozen=True, slots=True)
class Discovery:
    """One look."""

    gpu: bool | None
    """Whether some PCI function is an NVIDIA GPU; None where that can't be told."""
    os_release: Attribute
    """`/etc/os-release`."""
    unread: tuple[Unread, ...] = ()
    """What could not be read, with what is missing that every host has."""
