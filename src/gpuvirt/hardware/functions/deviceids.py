"""Reads the drivers' ids of GPUs: NVIDIA's UUIDs, product names and GPU instances in /proc, DRM nodes in /sys.

`GPU UUID` in `information` is question marks until the driver has initialised the GPU; such a GPU has no id here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA, FunctionKind, PciFunction, Unread
from gpuvirt.facts.snapshot import DeviceIds, DriverInformation
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.paths import HostPath

CAPABILITIES = HostPath("/proc/driver/nvidia/capabilities")
_UUID = re.compile(r"^GPU UUID:\s*(GPU-([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}))\s*$", re.MULTILINE)
_MODEL = re.compile(r"^Model:[ \t]*(\S[^\n]*?)[ \t]*$", re.MULTILINE)
_NO_MODEL = "Unknown"
MINOR = re.compile(r"^Device Minor:\s*([0-9]{1,3})\s*$", re.MULTILINE)
"""The minor number of `/dev/nvidia0` in `information`."""


def read_information(kernel: Kernel, gpu: PciAddress) -> str | Unread | None:
    """Return the text that NVIDIA's driver shows about a GPU in /proc."""
    return attributes.text(kernel, HostPath(f"/proc/driver/nvidia/gpus/{gpu}/information"))


def read_device_ids(kernel: Kernel, functions: Iterable[PciFunction]) -> DeviceIds:
    """Return the ids of the GPUs that are bound to native drivers."""
    uuids: dict[str, PciAddress] = {}
    nodes: dict[str, PciAddress] = {}
    minors: dict[str, PciAddress] = {}
    information: dict[PciAddress, DriverInformation | Unread] = {}
    for function in functions:
        if function.kind is not FunctionKind.GPU or not isinstance(function.driver, str) or function.on_vfio:
            continue
        address = function.address
        names = attributes.names(kernel, device_path(address, "drm"))
        nodes |= dict.fromkeys(names, address) if isinstance(names, list | tuple) else {}
        if function.id.vendor != NVIDIA:
            continue
        text = read_information(kernel, address)
        if isinstance(text, Unread):
            information[address] = text
        if not isinstance(text, str):
            continue
        uuid, model, minor = _UUID.search(text), _MODEL.search(text), MINOR.search(text)
        information[address] = DriverInformation(
            uuid[1] if uuid is not None else None,
            model[1] if model is not None and model[1] != _NO_MODEL else None,
            int(minor[1]) if minor is not None else None,
        )
        if uuid is not None:
            uuids[uuid[2].lower()] = address
        if minor is not None:
            minors[f"gpu{minor[1]}"] = address
    return DeviceIds(uuids, nodes, information, dict(_mig(kernel, minors)))


def _mig(kernel: Kernel, minors: Mapping[str, PciAddress]) -> Iterator[tuple[PciAddress, bool | Unread]]:
    """Yield whether each GPU has GPU instances; drivers without MIG have no list."""
    for minor, address in minors.items():
        instances = attributes.names(kernel, HostPath(f"{CAPABILITIES}/{minor}/mig"))
        if isinstance(instances, Unread):
            yield address, instances
        elif instances is not None:
            yield address, any(name.startswith("gi") for name in instances)
