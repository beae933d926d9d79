"""What a plan needs to know of a GPU and only nvidia-smi says, read in one go; what it does not say is Unread."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import GpuModes, Scheduler, SmiReport
from gpuvirt.hardware import nvidiasmi, vgpuscheduler
from gpuvirt.hardware.tools import PROGRAM, ToolError, Tools

T = TypeVar("T")


def read_report(tools: Tools, gpu: PciAddress, *, types: bool, scheduler: bool) -> SmiReport:
    """Return a GPU's modes, and on request its types and its scheduler: two to four calls of about a second."""
    modes = _said(lambda: nvidiasmi.read_modes(tools, gpu))
    return SmiReport(
        GpuModes(gpu, modes, modes, modes, modes, modes) if isinstance(modes, Unread) else modes,
        types=_types(tools, gpu) if types else {},
        scheduler=read_scheduler(tools, gpu) if scheduler else None,
    )


def read_scheduler(tools: Tools, gpu: PciAddress) -> Scheduler | Unread:
    """Return how a GPU's vGPUs share its time: one call."""
    return _said(lambda: vgpuscheduler.read_scheduler(tools, gpu))


def _types(tools: Tools, gpu: PciAddress) -> Mapping[str, VgpuType] | Unread:
    found = _said(lambda: nvidiasmi.read_supported(tools, gpu))
    return found if isinstance(found, Unread) else {str(one.id): one.name for one in found}


def _said(ask: Callable[[], T]) -> T | Unread:
    try:
        return ask()
    except ToolError as error:
        return Unread(PROGRAM, seen=str(error))
