"""Finds the GPU of a node of an AMD partition: its device lies below a platform device, not below the GPU's function.

A GPU in a partition mode (MI300X in CPX: 8 partitions) has a render node for each partition. That of the first one lies
below the function, all others below `/sys/devices/platform/amdgpu_xcp_1` (amdgpu_xcp_drm_dev_alloc; `amdgpu_xcp.1`
before 6.11), which names no GPU. The topology of `/dev/kfd` has the GPU of each render node.
"""

import re
from collections.abc import Collection, Iterator, Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions import modules
from gpuvirt.paths import HostPath

NODE = re.compile(r"/platform/amdgpu_xcp[._][0-9]+/(?:drm/renderD([0-9]+)|.*)\Z")
"""The folder of a device of a partition, with the minor of a render node."""
TOPOLOGY = HostPath("/sys/class/kfd/kfd/topology/nodes")
"""One folder for each GPU or partition (kfd_topology.c: node_show)."""
DRIVER = "amdgpu"
_BYTES = 16384


def read_owners(
    kernel: Kernel, render_minor: int | None, addresses: Collection[PciAddress]
) -> frozenset[PciAddress] | Unread:
    """Return which of these functions has the partition with a render node.

    All of AMD's, where the topology does not tell: each may have it.
    """
    for found in _read_nodes(kernel):
        if render_minor is not None and found.get("drm_render_minor") == render_minor:
            address = _address(found)
            return frozenset({address} & set(addresses))
    return _of_amds_driver(kernel, addresses)


def _of_amds_driver(kernel: Kernel, addresses: Collection[PciAddress]) -> frozenset[PciAddress] | Unread:
    found: set[PciAddress] = set()
    for address in addresses:
        driver = modules.driver_of(kernel, address)
        if isinstance(driver, Unread):
            return driver
        if driver == DRIVER:
            found.add(address)
    return frozenset(found)


def _read_nodes(kernel: Kernel) -> Iterator[Mapping[str, int]]:
    """Yield the properties of each node of the topology, without those that can't be read."""
    names = attributes.names(kernel, TOPOLOGY)
    for name in names if isinstance(names, list) else ():
        try:
            content = kernel.read(HostPath(f"{TOPOLOGY}/{name}/properties"), limit=_BYTES)
        except OSError:
            continue
        pairs = (line.split() for line in content.decode(errors="replace").splitlines())
        yield {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _address(node: Mapping[str, int]) -> PciAddress:
    """Return the function of a node: `location_id` has bus, device and function in its low 16 bits."""
    location = node.get("location_id", 0) & 0xFFFF
    bus, slot, function = location >> 8, location >> 3 & 0x1F, location & 7
    return PciAddress(f"{node.get('domain', 0):04x}:{bus:02x}:{slot:02x}.{function}")
