"""The facts that `gpuvirt discover` reads without privileges: whether the host has an NVIDIA GPU, and its OS."""

from dataclasses import dataclass

from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute


@dataclass(frozen=True, slots=True)
class Discovery:
    """The facts of one discovery."""

    gpu: bool | None
    """Whether a PCI function is an NVIDIA GPU; None if that is unknown."""
    os_release: Attribute
    """`/etc/os-release`."""
    unread: tuple[Unread, ...] = ()
    """Files that could not be read, or that are missing although every host has them."""
