"""The host on which GPUs are changed, and where the records of changes lie."""

from dataclasses import dataclass
from pathlib import Path

from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.tools import HostTools, Tools
from gpuvirt.node import originals
from gpuvirt.paths import HostRoots


@dataclass(frozen=True, slots=True)
class Site:
    """The host, real or simulated."""

    kernel: Kernel
    tools: Tools
    originals: Path
    """The record of the drivers that functions had."""
    locks: Path
    """A folder that does not outlive a boot."""


def site_of(kernel: Kernel, roots: HostRoots, driver: Path | None = None) -> Site:
    """Return a real host; `driver` is where the driver container's `/` is seen."""
    tools = HostTools(roots.system, driver or roots.run / "nvidia/driver")
    return Site(kernel, tools, roots.local(originals.FILE), roots.run / "gpuvirt/units")
