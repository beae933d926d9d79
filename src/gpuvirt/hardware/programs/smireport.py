"""Reads the part of a GPU's state that plans need and only nvidia-smi reports; values that it does not report are
Unread."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import GpuModes, Scheduler, SmiReport
from gpuvirt.hardware.access.tools import PROGRAM, ToolError, Tools
from gpuvirt.hardware.programs import nvidiasmi, vgpuscheduler

T = TypeVar("T")


def read_report(tools: Tools, gpu: PciAddress, *, types: bool, scheduler: bool) -> SmiReport:
    """Return a GPU's modes, and on request its types and its scheduler, by two to four calls of about a second."""
    modes = _or_unread(lambda: nvidiasmi.read_modes(tools, gpu))
    return SmiReport(
        GpuModes(gpu, modes, modes, modes, modes, modes) if isinstance(modes, Unread) else modes,
        types=read_types(tools, gpu) if types else {},
        scheduler=read_scheduler(tools, gpu) if scheduler else None,
    )


def read_scheduler(tools: Tools, gpu: PciAddress) -> Scheduler | Unread:
    """Return the scheduler of a GPU's vGPUs, by one call."""
    return _or_unread(lambda: vgpuscheduler.read_scheduler(tools, gpu))


def read_types(tools: Tools, gpu: PciAddress) -> Mapping[str, VgpuType] | Unread:
    """Return the names of the types that a GPU supports, by their numbers; by one call, also where the GPU is full."""
    found = _or_unread(lambda: nvidiasmi.read_supported(tools, gpu))
    return found if isinstance(found, Unread) else {str(supported.id): supported.name for supported in found}


def _or_unread(ask: Callable[[], T]) -> T | Unread:
    try:
        return ask()
    except ToolError as error:
        return Unread(PROGRAM, seen=str(error))
