"""The guest's PCI devices: what QEMU emulates, at which address, and with which identity.

The simulated host of the contract tests (tests/contract/host.yaml) has the same cards at the same addresses. The
firmware numbers buses in the order of the root ports' addresses, so the first port's card is on bus 1.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity that a function reports. QEMU has no option for it; see `identities`."""

    vendor: int
    device: int
    class_code: int
    subsystem: tuple[int, int]
    vf_device: int | None = None
    """The device id of its virtual functions."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device, as an argument of QEMU's `-device`."""

    argument: str
    name: str | None = None
    """QEMU's id for the device (`id=`), where it gets another identity."""
    identity: Identity | None = None


NVIDIA, AMD = 0x10DE, 0x1002
RTX4090 = Identity(NVIDIA, 0x2684, 0x030000, (NVIDIA, 0x16F4))
RTX4090_AUDIO = Identity(NVIDIA, 0x22BA, 0x040300, (NVIDIA, 0x16F4))
H100 = Identity(NVIDIA, 0x2330, 0x030200, (NVIDIA, 0x16C1))
MI300X = Identity(AMD, 0x74A1, 0x120000, (AMD, 0x74A1))
A10 = Identity(NVIDIA, 0x2236, 0x030200, (NVIDIA, 0x1482), vf_device=0x2236)
T4 = Identity(NVIDIA, 0x1EB8, 0x030200, (NVIDIA, 0x12A2))

PORTS = (0x05, 0x06, 0x07, 0x08, 0x09, 0x0A)
"""The root ports' device numbers on bus 0; each port's bus has the number of its position in this list."""


def _port(number: int) -> Device:
    return Device(
        f"pcie-root-port,id=port{number},chassis={number},slot={number},bus=pcie.0,addr={PORTS[number - 1]:#x}"
    )


def _rtx4090(number: int) -> tuple[Device, ...]:
    gpu, audio = f"gpu{number}", f"audio{number}"
    # Real cards report in each function that there are others. A function that does not gets a group of its own when it
    # appears again after a removal (kernel 6.1), although it shared one before.
    return (
        _port(number),
        Device(f"secondary-vga,id={gpu},bus=port{number},addr=0.0,multifunction=on", gpu, RTX4090),
        Device(f"ich9-intel-hda,id={audio},bus=port{number},addr=0.1,multifunction=on", audio, RTX4090_AUDIO),
    )


DEVICES = (
    Device("intel-iommu,intremap=on,caching-mode=on"),
    *_rtx4090(1),
    *_rtx4090(2),
    _port(3),
    Device("pci-testdev,id=gpu3,membar=32G,bus=port3", "gpu3", H100),
    _port(4),
    Device("pci-testdev,id=gpu4,membar=256M,bus=port4", "gpu4", MI300X),
    # QEMU 7.2 has no other device with virtual functions.
    _port(5),
    Device("nvme-subsys,id=subsystem"),
    Device(
        "nvme,id=gpu5,serial=gpu5,bus=port5,subsys=subsystem,sriov_max_vfs=4,sriov_vq_flexible=8,sriov_vi_flexible=4,"
        "max_ioqpairs=10,msix_qsize=6",
        "gpu5",
        A10,
    ),
    # Conventional PCI can't isolate devices: both are in the bridge's group.
    _port(6),
    Device("pcie-pci-bridge,id=bridge,bus=port6"),
    Device("secondary-vga,id=gpu6,bus=bridge,addr=1", "gpu6", T4),
    Device("secondary-vga,id=gpu7,bus=bridge,addr=2", "gpu7", T4),
)
