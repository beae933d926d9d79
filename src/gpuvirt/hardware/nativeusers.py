"""Who uses a function through its native driver: processes that have a node open which that driver made for it.

The nodes are those of DRM and sound below the function's own folder, and `/dev/nvidia0`, whose number NVIDIA's driver
tells in /proc. Nodes that serve all GPUs (`/dev/nvidiactl`, `/dev/nvidia-uvm`) say nothing of one.
"""

import errno
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.snapshot import User
from gpuvirt.hardware import attributes
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.users import command_of
from gpuvirt.paths import HostPath

NVIDIA_MAJOR = 195
"""Documentation/admin-guide/devices.txt; the minor is the GPU's own."""

_MINOR = re.compile(r"^Device Minor:\s*([0-9]{1,3})\s*$", re.MULTILINE)
_NUMBER = re.compile(r"([0-9]{1,8}):([0-9]{1,8})")


def read_native_users(kernel: Kernel, addresses: Iterable[PciAddress]) -> Mapping[PciAddress, tuple[User, ...]] | None:
    """Return the users of each function, None when processes can't be looked into."""
    owner = {number: address for address in addresses for number in _device_numbers(kernel, address)}
    found: defaultdict[PciAddress, dict[int, User]] = defaultdict(dict)
    try:
        for opened in kernel.open_files():
            address = owner.get(opened.device)
            if address is not None and opened.pid not in found[address]:
                found[address][opened.pid] = User(opened.pid, command_of(kernel, opened.pid), opened.path)
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EPERM, *attributes.ABSENT}:
            return None
        raise
    return {address: tuple(found[address][pid] for pid in sorted(found[address])) for address in sorted(found)}


def _device_numbers(kernel: Kernel, address: PciAddress) -> Iterable[int]:
    folder = f"/sys/bus/pci/devices/{address}"
    for kind in ("drm", "sound"):
        for name in _names(kernel, f"{folder}/{kind}"):
            yield from _number(kernel, f"{folder}/{kind}/{name}/dev")
            if kind == "sound":
                for inner in _names(kernel, f"{folder}/{kind}/{name}"):
                    yield from _number(kernel, f"{folder}/{kind}/{name}/{inner}/dev")
    told = attributes.text(kernel, HostPath(f"/proc/driver/nvidia/gpus/{address}/information"))
    if isinstance(told, str) and (match := _MINOR.search(told)):
        yield NVIDIA_MAJOR << 8 | int(match[1])


def _names(kernel: Kernel, folder: str) -> list[str]:
    names = attributes.names(kernel, HostPath(folder))
    return names if isinstance(names, list) else []


def _number(kernel: Kernel, path: str) -> Iterable[int]:
    """Yield a device number as stat gives it: minors above 255 have their upper bits above the major."""
    told = attributes.text(kernel, HostPath(path))
    if isinstance(told, str) and (match := _NUMBER.fullmatch(told)):
        major, minor = int(match[1]), int(match[2])
        yield (major & 0xFFF) << 8 | minor & 0xFF | (minor & ~0xFF) << 12 | (major & ~0xFFF) << 32
