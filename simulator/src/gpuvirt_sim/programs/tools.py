"""The programs of a simulated host: modprobe, sriov-manage and nvidia-smi, called by their command lines.

gpuvirt calls them through the same code as a real host's. On a mounted host they are also executables (`programs`).
"""

import errno
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA
from gpuvirt.hardware.access.tools import Ended, HostTools, Program
from gpuvirt.hardware.functions.modules import read_aliases
from gpuvirt_sim.devices.function import SimFunction, uevent_text
from gpuvirt_sim.files.durations import Operation
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.nvidiasmi import NvidiaSmi

NVIDIAS = tuple(Program)
FINE = Ended(0, "", "")
SRIOV_MANAGE_USAGE = """Usage: sriov-manage <-e|-d> <ssss:bb:dd.f|ALL>
Enable or disable the VFs of the GPU at a PCI address, or of all GPUs of the driver nvidia.
"""


class SimTools:
    """Runs the programs of a simulated host."""

    def __init__(
        self,
        kernel: SimKernel,
        modules: Collection[str] = ("vfio-pci", "nvidia", "snd_hda_intel"),
        programs: Collection[str] = NVIDIAS,
    ) -> None:
        self.loaded: list[str] = []
        self.commands: list[tuple[str, ...]] = []
        """The commands that were run, without the folders of their programs."""
        self.before: Callable[[Sequence[str]], None] = lambda command: None  # noqa: ARG005
        """Called before each command."""
        self.during: Callable[[str], None] = lambda stage: None  # noqa: ARG005
        """Called between the steps of sriov-manage, with the name of the next step."""
        self._kernel = kernel
        self._modules = modules
        self._smi = NvidiaSmi(kernel)
        self._tools = HostTools(
            Path("/"),
            run=self._run,
            pause=lambda _: None,
            has=lambda place: place.name in programs,
        )

    def modprobe(self, module: str) -> None:
        """Load a module, which adds its driver."""
        self._tools.modprobe(module)

    def sriov_manage(self, address: PciAddress, enable: bool) -> None:
        """Enable or disable the VFs of a GPU, as NVIDIA's script does."""
        self._tools.sriov_manage(address, enable)

    def nvidia_smi(self, *arguments: str) -> str:
        """Return the output of nvidia-smi."""
        return self._tools.nvidia_smi(*arguments)

    def demand(self, program: Program) -> None:
        """Fail unless a program is installed."""
        self._tools.demand(program)

    def demand_module(self, module: str) -> None:
        """Fail unless a module can be loaded."""
        self._tools.demand_module(module)

    def run(self, program: str, arguments: Sequence[str]) -> Ended:
        """Run a program, and return its outcome; raise FileNotFoundError where the host does not have it."""
        with self._kernel.blocking.condition:
            if program in set(Operation):
                self._kernel.blocking.spend(Operation(program))
            match program:
                case "modprobe":
                    return self._modprobe(arguments)
                case "sriov-manage":
                    return self._sriov_manage(arguments)
                case "nvidia-smi":
                    return self._smi.run(arguments)
                case _:
                    raise FileNotFoundError(errno.ENOENT, "No such file or directory", program)

    def _run(self, command: Sequence[str], timeout_s: float | None) -> Ended:  # noqa: ARG002  nothing takes long here
        program, arguments = command[0].rpartition("/")[2], tuple(command[1:])
        self.commands.append((program, *arguments))
        self.before(command)
        return self.run(program, arguments)

    def _modprobe(self, arguments: Sequence[str]) -> Ended:
        modules = [argument for argument in arguments if not argument.startswith("-")]
        if len(modules) != 1:
            return Ended(1, "", "modprobe: expected one module: modprobe vfio-pci\n")
        (module,) = modules
        dry_run = bool({"-n", "--dry-run"} & set(arguments))
        module = self._driver_of_alias(module) if module.startswith("pci:") else module
        if module not in self._modules and not self._has_vfio_alias(module):
            return Ended(1, "", f"modprobe: FATAL: Module {module} not found")
        if dry_run:
            return FINE
        self.loaded.append(module)
        self._kernel.pci.add_driver(module)
        return FINE

    def _has_vfio_alias(self, module: str) -> bool:
        """Return whether a module is a VFIO driver that `modules.alias` names."""
        lines = str(read_aliases(self._kernel)).splitlines()
        return any(line.startswith("alias vfio_pci:") and line.endswith(f" {module}") for line in lines)

    def _driver_of_alias(self, alias: str) -> str:
        """Return the native driver of the function with this modalias, or the alias itself where there is none."""
        for function in self._kernel.pci.functions.values():
            if function.native_driver is not None and f"MODALIAS={alias}\n" in uevent_text(function):
                return function.native_driver
        return alias

    def _sriov_manage(self, arguments: Sequence[str]) -> Ended:
        """Enable or disable VFs as NVIDIA's script does, which succeeds without effect on a card without VFs."""
        if len(arguments) != 2 or arguments[0] not in {"-e", "-d"}:
            return Ended(1, "", SRIOV_MANAGE_USAGE)
        enable, desired = arguments[0] == "-e", arguments[1]
        if desired != "ALL":
            function = self._kernel.pci.functions.get(PciAddress(desired.lower()))
            if function is None or function.id.vendor != NVIDIA:
                return Ended(1, "", f"sriov-manage: no NVIDIA GPU at {desired}; expected an address as 0000:65:00.0\n")
            return self._switch_of(function, enable=enable)
        gpus = [function for function in self._kernel.pci.functions.values() if function.driver == "nvidia"]
        ends = [self._switch_of(gpu, enable=enable) for gpu in gpus if gpu.physfn is None]
        code = next((ended.exit_code for ended in ends if ended.exit_code), 0)
        return Ended(code, "".join(end.stdout for end in ends), "".join(end.stderr for end in ends))

    def _switch_of(self, function: SimFunction, *, enable: bool) -> Ended:
        if function.total_vfs is None or enable == bool(function.virtfns):
            return FINE
        if function.driver == "nvidia" and not self._kernel.nvidia.lock(function.address):
            return Ended(1, "", f"Cannot obtain unbindLock for {function.address}\n")
        self._switch(function, function.total_vfs if enable else 0)
        return Ended(0, f"{'Enabling' if enable else 'Disabling'} VFs on {function.address}\n", "")

    def _switch(self, function: SimFunction, count: int) -> None:
        """Create or remove VFs through pci-pf-stub, which only allows VFs, and bind the GPU to nvidia again."""
        pci = self._kernel.pci
        if function.driver is not None:
            self.during("unbind")
            pci.unbind(function)
        self.during("bind to pci-pf-stub")
        pci.bind(function, "pci-pf-stub")
        self.during("switch")
        self._kernel.vfs.switch(function, count)
        self.during("unbind from pci-pf-stub")
        pci.unbind(function)
        self.during("bind")
        with suppress(OSError):  # the script does not check whether the driver binds
            pci.bind(function, "nvidia")
