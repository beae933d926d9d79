"""Changes the identities of devices in a QEMU that has not started its guest, by writing to its memory.

No option of QEMU sets the ids of its devices. But the process has an array for each function's configuration space,
which the guest reads. The ids that a function has now lead to its array. Where two functions have the same ids, this
module changes one array for a moment and reads QEMU's device tree, which shows the function.
"""

import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lab.kernel.errors import LabError
from lab.kernel.qmp import Qmp
from lab.kernel.topology import Device, Identity

CLASS, SUBSYSTEM, EXTENDED = 0x09, 0x2C, 0x100
SRIOV_CAPABILITY, VF_DEVICE = 0x10, 0x1A
"""Offsets in configuration space: PCI Local Bus 3.0, 6.1, and the PCI Express SR-IOV capability."""

LARGEST_REGION = 256 << 20
"""QEMU's own memory regions are smaller; larger ones are the guest's."""
PROBE = struct.pack("<HH", 0xDEAD, 0xBEEF)

Ids = tuple[int, int, int, int]
"""Vendor, device, subsystem vendor, subsystem."""

_DEVICE = re.compile(r'\s*dev: [^,]+, id "(.*)"')
_IDS = re.compile(r"addr \S+, pci id (\w{4}):(\w{4}) \(sub (\w{4}):(\w{4})\)")


class Memory:
    """The memory of a process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._file = Path(f"/proc/{pid}/mem").open("r+b", buffering=0)  # noqa: SIM115  closed by close()

    def read(self, address: int, size: int) -> bytes:
        """Return the bytes at an address."""
        self._file.seek(address)
        return self._file.read(size)

    def write(self, address: int, data: bytes) -> None:
        """Write bytes to an address."""
        self._file.seek(address)
        self._file.write(data)

    def close(self) -> None:
        """Close the memory."""
        self._file.close()

    def regions(self) -> Iterator[tuple[int, bytes]]:
        """Yield the regions that can contain QEMU's own data, with their start addresses."""
        for line in Path(f"/proc/{self._pid}/maps").read_text().splitlines():
            span, access, *rest = line.split()
            start, end = (int(text, 16) for text in span.split("-"))
            anonymous = len(rest) < 4 or rest[3] == "[heap]"
            if access.startswith("rw") and anonymous and end - start < LARGEST_REGION:
                try:
                    yield start, self.read(start, end - start)
                except OSError:  # guard pages
                    continue


def give_identities(qmp: Qmp, devices: Iterable[Device]) -> None:
    """Give each device its identity."""
    desired = {device.name: device.identity for device in devices if device.name and device.identity}
    now = _ids(qmp)
    memory = Memory(qmp.pid)
    try:
        spaces = _find_spaces(memory, {now[name] for name in desired})
        for name, identity in desired.items():
            space = _space_of(qmp, memory, name, spaces[now[name]])
            spaces[now[name]].remove(space)
            _write(memory, space, identity)
    finally:
        memory.close()


def _ids(qmp: Qmp) -> Mapping[str, Ids]:
    found: dict[str, Ids] = {}
    name = ""
    for line in qmp.monitor("info qtree").splitlines():
        if match := _DEVICE.match(line):
            name = match[1]
        elif (match := _IDS.search(line)) and name:
            vendor, device, board_vendor, board = (int(text, 16) for text in match.groups())
            found[name] = vendor, device, board_vendor, board
    return found


def _find_spaces(memory: Memory, desired: set[Ids]) -> dict[Ids, list[int]]:
    """Return the addresses of possible configuration spaces with each of these ids."""
    heads = {struct.pack("<HH", *ids[:2]) for ids in desired}
    pattern = re.compile(b"|".join(re.escape(head) for head in heads))
    found: dict[Ids, list[int]] = defaultdict(list)
    for start, content in memory.regions():
        for match in pattern.finditer(content):
            space = content[match.start() : match.start() + SUBSYSTEM + 4]
            if match.start() % 16 == 0 and len(space) == SUBSYSTEM + 4:
                ids = (*struct.unpack_from("<HH", space), *struct.unpack_from("<HH", space, SUBSYSTEM))
                if ids in desired:
                    found[ids].append(start + match.start())
    return found


def _space_of(qmp: Qmp, memory: Memory, name: str, candidates: list[int]) -> int:
    for space in candidates:
        before = memory.read(space, len(PROBE))
        memory.write(space, PROBE)
        if _ids(qmp)[name][:2] == struct.unpack("<HH", PROBE):
            return space
        memory.write(space, before)
    raise LabError(f"the configuration space of {name} was not found in QEMU's memory")


def _write(memory: Memory, space: int, identity: Identity) -> None:
    memory.write(space, struct.pack("<HH", identity.vendor, identity.device))
    memory.write(space + CLASS, struct.pack("<I", identity.class_code)[:3])
    memory.write(space + SUBSYSTEM, struct.pack("<HH", *identity.subsystem))
    if identity.vf_device is None:
        return
    capability = EXTENDED
    while capability:
        (header,) = struct.unpack("<I", memory.read(space + capability, 4))
        if header & 0xFFFF == SRIOV_CAPABILITY:
            memory.write(space + capability + VF_DEVICE, struct.pack("<H", identity.vf_device))
            return
        capability = header >> 20
    raise LabError("a function with virtual functions has no SR-IOV capability")
