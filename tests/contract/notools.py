"""The programs of a host that has none."""

from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.access.tools import Program, ToolError, ToolMissingError


class NoTools:
    """No tools: the hosts have all modules loaded."""

    def modprobe(self, module: str) -> None:
        raise ToolError(f"{module} should be there")

    def sriov_manage(self, address: PciAddress, enable: bool) -> None:
        raise ToolMissingError(f"nobody asks for it: {address} {enable}")

    def nvidia_smi(self, *arguments: str) -> str:
        raise ToolMissingError(f"nobody asks for it: {arguments}")

    def demand(self, program: Program) -> None:
        raise ToolMissingError(f"nobody asks for it: {program}")

    def demand_module(self, module: str) -> None:
        raise ToolError(f"{module} should be there")
