"""The measured hosts: any number of GPUs, as files."""

from pathlib import Path

from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec

A10_DEVICES = 256
"""GPUs in one PCI domain: one on each bus."""


def write_host(gpus: int, folder: Path) -> Path:
    """Write a host with `gpus` A10 on vfio-pci below `folder`, each in its own IOMMU group."""
    slots = tuple(
        SlotSpec(
            at=f"{number // A10_DEVICES:04x}:{number % A10_DEVICES:02x}:00.0",
            board="A10",
            driver="vfio-pci",
            group=number + 1,
            numa=number % 2,
        )
        for number in range(gpus)
    )
    export(build_host(HostSpec(about=f"{gpus} A10", slots=slots)), folder)
    return folder
