"""The programs of a simulated host: modprobe, by which drivers appear."""

from collections.abc import Collection

from gpuvirt.hardware.tools import ToolError
from gpuvirt.sim.kernel import SimKernel


class SimTools:
    """What is asked of a simulated host's programs."""

    def __init__(self, kernel: SimKernel, modules: Collection[str] = ("vfio-pci", "nvidia", "snd_hda_intel")) -> None:
        self._kernel = kernel
        self._modules = modules
        self.loaded: list[str] = []

    def modprobe(self, module: str) -> None:
        """Load a module, which is its driver."""
        if module not in self._modules:
            raise ToolError(f"modprobe -- {module} ended with 1: FATAL: Module {module} not found")
        self.loaded.append(module)
        self._kernel.pci.add_driver(module)
