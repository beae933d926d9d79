"""A simulated kernel whose callers have threads of their own keeps them asleep as a real one does."""

import threading

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.paths import HostPath
from gpuvirt.sim.builder import build_machine
from gpuvirt.sim.machine import load_machine


def test_a_writer_sleeps_until_the_user_lets_go() -> None:
    kernel = build_machine(load_machine("2xA10"), wait=True)
    process = kernel.start_machine(IommuGroup(12))
    done = threading.Event()

    def write() -> None:
        kernel.write(HostPath("/sys/bus/pci/drivers/vfio-pci/unbind"), b"0000:65:00.0")
        done.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert not done.wait(0.1)
    assert kernel.vfio.requests == ["0000:65:00.0"]
    kernel.end_machine(process)
    assert done.wait(100)
    assert kernel.pci.functions[PciAddress("0000:65:00.0")].driver is None
