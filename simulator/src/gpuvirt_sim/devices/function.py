"""A simulated PCI function: its identity, its state, and the content of its plain attributes."""

import struct

import msgspec

from gpuvirt.facts.ids import IommuGroup, PciAddress, PciId
from gpuvirt.paths import HostPath


class VfIdentity(msgspec.Struct, frozen=True):
    """The identity of a function's VFs."""

    id: PciId
    class_code: int
    native_driver: str | None


class SimFunction(msgspec.Struct, eq=False):
    """One function: its identity, and the state that writes change."""

    address: PciAddress
    id: PciId
    class_code: int
    folder: HostPath
    """The real path of the function, below its bridge: `/sys/devices/pci0000:64/0000:64:02.0/0000:65:00.0`."""
    subsystem: PciId | None = None
    revision: int | None = 0xA1
    group: IommuGroup | None = None
    numa_node: int = -1
    native_driver: str | None = None
    """The driver that the kernel would bind to the function."""
    override: str | None = None
    driver: str | None = None
    leaving: bool = False
    """Whether a writer waits to unbind the function, which is in use."""
    fell_off_bus: bool = False
    physfn: PciAddress | None = None
    vf_number: int | None = None
    """The number of a VF: 2 where the GPU has the link `virtfn2` to the VF."""
    virtfns: list[PciAddress] = msgspec.field(default_factory=list)
    total_vfs: int | None = None
    vf: VfIdentity | None = None
    model: str = "NVIDIA Graphics Device"
    """The product name that NVIDIA's driver shows; in a VM with a vGPU the vGPU type."""
    takes_numvfs: bool = True
    """Whether the native driver creates VFs by `sriov_numvfs`; NVIDIA's does not."""


def id_texts(function: SimFunction) -> dict[str, str]:
    """Return the attributes that identify a function, with their contents."""
    ids = {"vendor": f"0x{function.id.vendor:04x}", "device": f"0x{function.id.device:04x}"}
    ids["class"] = f"0x{function.class_code:06x}"
    if function.revision is not None:
        ids["revision"] = f"0x{function.revision:02x}"
    if function.subsystem is not None:
        ids["subsystem_vendor"] = f"0x{function.subsystem.vendor:04x}"
        ids["subsystem_device"] = f"0x{function.subsystem.device:04x}"
    return ids


def uevent_text(function: SimFunction) -> str:
    """Return the content of `uevent`."""
    board = function.subsystem or PciId(0, 0)
    lines = [f"DRIVER={function.driver}"] if function.driver else []
    lines += [f"PCI_CLASS={function.class_code:X}", f"PCI_ID={str(function.id).upper()}"]
    lines += [f"PCI_SUBSYS_ID={str(board).upper()}", f"PCI_SLOT_NAME={function.address}"]
    ids = f"v{function.id.vendor:08X}d{function.id.device:08X}sv{board.vendor:08X}sd{board.device:08X}"
    base, sub, interface = function.class_code.to_bytes(3, "big")
    return "\n".join([*lines, f"MODALIAS=pci:{ids}bc{base:02X}sc{sub:02X}i{interface:02X}", ""])


def config_bytes(function: SimFunction) -> bytes:
    """Return the configuration space: all bits are set for a card that fell off its bus, and in the ids of a VF."""
    if function.fell_off_bus:
        return b"\xff" * 256
    vendor, device = (0xFFFF, 0xFFFF) if function.physfn is not None else (function.id.vendor, function.id.device)
    head = struct.pack("<HHHHB", vendor, device, 0x0406, 0x0010, function.revision or 0)
    head += struct.pack("<I", function.class_code)[:3]
    board = function.subsystem or PciId(0, 0)
    return head.ljust(0x2C, b"\0") + struct.pack("<HH", board.vendor, board.device).ljust(212, b"\0")


LINES = 13
"""Six BARs, the expansion ROM, and six BARs that the VFs share."""

SMALL = (0xA0000000, 0xA0FFFFFF, 0x40200)
LARGE_BYTES = 32 << 30
LARGE_AT = 0x38000000000
PREFETCHABLE_64 = 0x14220C


def resource(*, unassigned: bool = False) -> str:
    """Return the BARs of a GPU with 32 GiB, a small and a large one; an unassigned large one starts at 0."""
    start = 0 if unassigned else LARGE_AT
    bars = [SMALL, (start, start + LARGE_BYTES - 1, PREFETCHABLE_64)]
    bars += [(0, 0, 0)] * (LINES - len(bars))
    return "".join(f"0x{first:016x} 0x{last:016x} 0x{flags:016x}\n" for first, last, flags in bars)
