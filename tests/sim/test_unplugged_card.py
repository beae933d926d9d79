"""A card that is unplugged from a simulated host: its VFs, and the vGPUs on them, leave with it."""

from gpuvirt.facts.ids import PciAddress
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host

GPU = PciAddress("0000:25:00.0")


def test_a_card_returns_without_the_vfs_that_it_had() -> None:
    kernel = build_host(load_host("4xL40S"), where="4xL40S")
    vfs = set(kernel.pci.functions[GPU].virtfns)
    assert vfs == set(kernel.vfs.carriers[GPU].vgpu_host.slots)
    kernel.unplug(GPU)
    assert not vfs & kernel.pci.functions.keys()
    kernel.plug_in(GPU)
    assert not kernel.pci.functions[GPU].virtfns
    assert not kernel.vfs.carriers[GPU].vgpu_host.slots
